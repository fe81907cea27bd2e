"""Files that are damaged in ways that would give wrong logits, and files that change while they
are open."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_life_scenes import PROMPT
from gguf_models import Spec, make_model
from gguf_variants import Tensors, write_variant
from numpy.typing import NDArray
from scene import refusal

from vram_conductor.protocol.errors import DataLoss
from vram_conductor.worker.gguf_header import read_header
from vram_conductor.worker.pipeline.forward import Batch
from vram_conductor.worker.pipeline.gguf_tensors import GgufTensors
from vram_conductor.worker.pipeline.layer_engine import LayerEngine
from vram_conductor.worker.pipeline.model_file import ModelFile

LLAMA = Spec(arch="llama", n_layer=3)


def with_offset(source: Path, target: Path, name: str, moved: Callable[[int], int]) -> Path:
    """A copy in which the list of tensors says that one begins elsewhere."""
    data = bytearray(source.read_bytes())
    (info,) = (tensor for tensor in read_header(str(source)).tensors if tensor.name == name)
    key = struct.pack("<Q", len(name)) + name.encode()
    # Behind the name: dimensions, type, offset.
    at = data.index(key) + len(key) + 4 + 8 * len(info.shape) + 4
    assert struct.unpack_from("<Q", data, at)[0] == info.offset
    struct.pack_into("<Q", data, at, moved(info.offset))
    target.write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        (lambda offset: offset + 1, "no multiple of 32"),
        (lambda offset: offset + 4, "no multiple of 32"),
        (lambda offset: offset + 32, "within tensor blk.1.attn_q.weight"),
        (lambda offset: offset - 4096, "within tensor"),
        (lambda offset: 0, "within tensor"),
    ],
)
def test_tensors_that_lie_in_each_other_are_refused(
    moved: Callable[[int], int], text: str, tmp_path: Path
) -> None:
    path = with_offset(make_model(LLAMA), tmp_path / "m.gguf", "blk.1.attn_q.weight", moved)
    refused = refusal(lambda: ModelFile.open(path))
    assert refused.reason == "bad_model"
    assert text in refused.message
    assert "tensor blk.1" in refused.message


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 1e-45])
def test_rotations_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    freqs = np.ones(16, np.float32)
    freqs[3] = value
    tensors: Tensors = {"rope_freqs.weight": freqs}
    path = write_variant(make_model(LLAMA), tmp_path / "m.gguf", tensors=tensors)
    refused = refusal(lambda: ModelFile.open(path))
    assert refused.reason == "bad_model"
    assert "rope_freqs" in refused.message


def test_so_are_those_of_a_scaling_near_zero(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e-40}
    path = write_variant(make_model(LLAMA), tmp_path / "m.gguf", metadata)
    refused = refusal(lambda: ModelFile.open(path))
    assert refused.reason == "bad_model"
    assert "llama.rope.scaling.factor is 9.99995e-41, too near to 0" in refused.message


@pytest.mark.parametrize("window", [1 << 31, (1 << 32) - 1])
def test_a_window_beyond_all_positions_sees_everything(window: int, tmp_path: Path) -> None:
    source = make_model(Spec(arch="gemma3", n_layer=2))
    logits: list[NDArray[np.float32]] = []
    for size in (window, 4096):
        path = tmp_path / f"{size}.gguf"
        write_variant(source, path, {"gemma3.attention.sliding_window": size})
        with LayerEngine.open(path, n_ctx=32) as engine:
            logits.append(engine.step(Batch.of(range(20), 0)))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_a_truth_is_no_alignment(tmp_path: Path) -> None:
    path = write_variant(make_model(LLAMA), tmp_path / "m.gguf", {"general.alignment": True})
    assert "general.alignment is True" in str(refusal(lambda: ModelFile.open(path)))


def test_a_big_endian_file_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100))
    assert "is big-endian" in str(refusal(lambda: ModelFile.open(path)))


def test_a_pipe_is_no_model_and_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Held open, so that opening it in vain would not last for ever.
    held = os.open(pipe, os.O_RDWR)
    try:
        os.write(held, bytes(4096))
        refused = refusal(lambda: ModelFile.open(pipe))
    finally:
        os.close(held)
    assert refused.reason == "no_such_model"
    assert "it is no file" in refused.message


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000])
def test_names_that_no_file_can_have(name: str) -> None:
    assert refusal(lambda: ModelFile.open(name)).reason == "no_such_model"


def test_a_file_that_is_cut_off_while_it_is_open_ends_the_step_only(tmp_path: Path) -> None:
    path = Path(shutil.copy(make_model(LLAMA), tmp_path / "m.gguf"))
    whole = path.read_bytes()
    with LayerEngine.open(path, n_ctx=64, tokens_max=16, wanted_max=16) as engine:
        right = engine.step(PROMPT)
        # In place, as `cp` does it.
        os.truncate(path, len(whole) // 2)
        refused = refusal(lambda: engine.step(PROMPT))
        assert refused.reason == "truncated_model"
        assert refused.details["file_bytes"] == len(whole) // 2
        assert refused.details["opened_bytes"] == len(whole)
        assert engine.lengths == [0]
        path.write_bytes(whole)
        np.testing.assert_array_equal(engine.step(PROMPT), right)


def test_a_file_that_is_replaced_while_it_is_open_stays_what_it_was(tmp_path: Path) -> None:
    path = Path(shutil.copy(make_model(LLAMA), tmp_path / "m.gguf"))
    with LayerEngine.open(path, n_ctx=64, tokens_max=16, wanted_max=16) as engine:
        right = engine.step(PROMPT)
        shutil.copy(make_model(Spec(arch="llama", n_layer=3, seed=7)), tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(path)
        np.testing.assert_array_equal(engine.step(PROMPT), right)
        path.unlink()
        np.testing.assert_array_equal(engine.step(PROMPT), right)


def test_a_file_that_cannot_be_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk or a network fails."""

    def failing(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with GgufTensors.open(make_model(LLAMA)) as gguf:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(DataLoss, match="Input/output error") as raised:
            gguf.data("output_norm.weight")
    assert raised.value.reason == "unreadable_model"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    damaged = with_offset(
        make_model(LLAMA), tmp_path / "m.gguf", "blk.1.attn_q.weight", lambda offset: 1 << 60
    )
    before = held()
    for _ in range(3):
        with LayerEngine.open(make_model(LLAMA), n_ctx=64, tokens_max=16, wanted_max=16) as engine:
            engine.step(PROMPT)
            assert held() == before + 1
        refusal(lambda: LayerEngine.open(damaged))
        refusal(lambda: LayerEngine.open(make_model(LLAMA), n_ctx=1 << 50))
    assert held() == before
