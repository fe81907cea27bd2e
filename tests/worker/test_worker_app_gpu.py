"""Whatever is wrong with a GPU reaches whoever starts the worker as one line that helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from worker_process import WorkerProcess

from vram_conductor.worker.exits import EXIT_TEMPORARY, EXIT_UNAVAILABLE
from vram_conductor.worker.llama.library import library

FAKE_SITE = Path(__file__).parents[1] / "fake_site"
CONFIG = '[[device]]\nid = "cuda:0"\nkind = "cuda"\ncapacity = "4GiB"\n'

Start = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def start(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start(device, *flags, **nvml)``: exit code and log lines of a worker that cannot serve."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_SITE))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(device: str, *flags: str, **nvml: int) -> tuple[int, list[str]]:
        monkeypatch.setenv("FAKE_NVML", json.dumps(nvml))
        endpoint = f"ipc://{short_tmp}/w.ipc"
        with WorkerProcess(short_tmp / "w", endpoint, *flags, device=device) as worker:
            code = worker.process.wait(60)
            return code, worker.log.strip().splitlines()

    return run


@pytest.mark.parametrize(
    ("failure", "code", "reason", "advice"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, EXIT_UNAVAILABLE, "no_driver", "--gpus all"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, EXIT_UNAVAILABLE, "no_driver", "set capacity"),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            EXIT_UNAVAILABLE,
            "driver_mismatch",
            "reboot",
        ),
        (pynvml.NVML_ERROR_GPU_IS_LOST, EXIT_TEMPORARY, "gpu_lost", "reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, EXIT_TEMPORARY, "nvml_error", "NVML says"),
    ],
)
def test_driver_trouble_is_one_line(
    start: Start, failure: int, code: int, reason: str, advice: str
) -> None:
    found, lines = start("cuda:0", nvmlInit=failure)
    assert found == code
    assert len(lines) == 1, lines
    assert f"refused: {reason}: " in lines[0]
    assert advice in lines[0]


def test_an_index_beyond_the_last_gpu_is_one_line(start: Start) -> None:
    found, lines = start("cuda:2", gpus=2)
    assert found == EXIT_UNAVAILABLE
    assert len(lines) == 1, lines
    assert "no_such_device" in lines[0]
    assert "this machine has 2 GPUs" in lines[0]


def test_a_hidden_gpu_is_one_line(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, lines = start("cuda:0", gpus=2)
    assert found == EXIT_UNAVAILABLE
    assert len(lines) == 1, lines
    assert "CUDA_VISIBLE_DEVICES" in lines[0]


@pytest.mark.skipif(library().gpu_offload, reason="this llama.cpp can use a GPU")
def test_a_library_without_cuda_is_one_line(start: Start) -> None:
    found, lines = start("cuda:0")
    assert found == EXIT_UNAVAILABLE
    assert len(lines) == 1, lines
    assert "no_device" in lines[0]
    assert "GGML_CUDA=on" in lines[0]


@pytest.mark.skipif(library().gpu_offload, reason="this llama.cpp can use a GPU")
def test_with_a_capacity_nvml_is_not_needed(start: Start, short_tmp: Path) -> None:
    """It gets past the measuring; what is missing then is CUDA."""
    config = short_tmp / "c.toml"
    config.write_text(CONFIG)
    missing = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    found, lines = start("cuda:0", "--config", str(config), nvmlInit=missing)
    assert found == EXIT_UNAVAILABLE
    warning, refusal = lines
    assert "is not measured" in warning
    assert str(4 << 30) in warning
    assert "no_device" in refusal
