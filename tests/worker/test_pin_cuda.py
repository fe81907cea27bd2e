"""Pinning through the driver, on a stand-in for libcuda."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from vmm_rig import STUB, compile_c

from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.worker.app import start_pinning
from vram_conductor.worker.pinning import Pinning

if TYPE_CHECKING:
    from vram_conductor.worker.options import Options

SCENE = r"""
import ctypes, mmap, sys, threading
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.pin_cuda import CudaPinner

STEP = 1 << 20
try:
    pinner = CudaPinner()
except ConductorError as error:
    print("refused", error.reason, error.info.message)
    sys.exit()
stub = ctypes.CDLL(__import__("os").environ["VRAM_CONDUCTOR_LIBCUDA"])
stub.stub_registered.restype = ctypes.c_uint64
assert (stub.stub_depth(), stub.stub_registered(), stub.stub_retained()) == (0, 0, 1)
print("spans", pinner.spans)
memory = mmap.mmap(-1, 4 * STEP)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

def pin(at, size):
    try:
        pinner.pin(address + at, size)
    except ConductorError as error:
        print(error.info.code, error.reason, error.info.message)

pin(0, STEP)
other = threading.Thread(target=pin, args=(STEP, STEP))
other.start()
other.join()
print("pinned", stub.stub_registered() // STEP)
pin(0, STEP)
pin(2 * STEP, 2 * STEP)
for at in (0, STEP, 2 * STEP, 0):
    try:
        pinner.unpin(address + at)
    except ConductorError as error:
        print(error.info.code, error.reason, error.info.message)
pinner.close()
pinner.close()
print("left", stub.stub_registered(), stub.stub_retained(), stub.stub_depth())
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    return compile_c([STUB / "pinning.c"], target, "-fvisibility=default")


def scene(libcuda: Path | str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCENE],
        env={"VRAM_CONDUCTOR_LIBCUDA": str(libcuda), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ranges_are_pinned_by_any_thread_and_mistakes_are_told(stub: Path) -> None:
    spans, pinned, twice, unknown, left = scene(stub)
    assert (spans, pinned) == ("spans True", "pinned 2")
    assert "pin_refused" in twice
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" in twice
    assert "ulimit" in twice
    assert "unpin_failed" in unknown
    assert "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" in unknown
    assert left == "left 0 0 0"


def test_a_driver_whose_copies_end_at_a_range_is_noticed(stub: Path) -> None:
    assert scene(stub, STUB_NO_SPAN="1")[0] == "spans False"


def test_a_limit_is_a_refusal_with_the_drivers_word(stub: Path) -> None:
    spans, _, _, refused, *_, left = scene(stub, STUB_LIMIT=str(3 << 20))
    assert spans == "spans True"
    assert "RESOURCE_EXHAUSTED pin_refused 2097152 bytes" in refused
    assert "CUDA_ERROR_OUT_OF_MEMORY" in refused
    assert left == "left 0 0 0"


def test_no_room_even_for_the_probe_means_one_range_per_half(stub: Path) -> None:
    spans, refused, pinned, *_ = scene(stub, STUB_LIMIT=str(1 << 20))
    assert (spans, pinned) == ("spans False", "pinned 1")
    assert "pin_refused" in refused


@pytest.mark.parametrize(
    ("libcuda", "env", "word"),
    [
        ("/nowhere/libcuda.so.1", {}, "no usable CUDA driver"),
        ("libc.so.6", {}, "no usable CUDA driver"),
        (None, {"STUB_NO_DEVICE": "1"}, "cuDeviceGet: CUDA error 101"),
    ],
)
def test_without_a_usable_driver_there_is_no_pinner(
    stub: Path, libcuda: str | None, env: dict[str, str], word: str
) -> None:
    (told,) = scene(libcuda or stub, **env)
    assert told.startswith("refused no_pinning")
    assert word in told


def test_a_worker_without_a_driver_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_LIBCUDA", "/nowhere/libcuda.so.1")
    for kind, cap, word in (
        ("cuda", 1 << 30, "pageable (no usable"),
        ("cpu", 0, ""),
        ("cuda", 0, ""),
    ):
        device = DeviceConfig(id="device", kind=kind)  # type: ignore[arg-type]
        pinning = Pinning(cap)
        start_pinning(cast("Options", SimpleNamespace(device=device)), pinning)
        assert not pinning.active
        assert word in pinning.note()
        assert bool(word) == bool(pinning.note())
        pinning.close()
    assert len(caplog.records) == 1
