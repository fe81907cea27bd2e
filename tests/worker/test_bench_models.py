"""Random-weight models: of the size that they claim, and llama.cpp serves them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from small_tmpfs import small_tmpfs

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from vram_conductor.worker.bench import random_models
from vram_conductor.worker.bench.random_models import END_TOKEN, is_random, make_random
from vram_conductor.worker.bench.random_shapes import BLOCK_VALUES, SHAPES, find_shape
from vram_conductor.worker.bench.rates import copy_rates

TINY = [name for name in SHAPES if name.startswith("tiny")]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_one_that_llama_cpp_takes(name: str) -> None:
    shape = find_shape(name)
    assert shape.n_embd % shape.head_dim == 0
    assert shape.n_head % shape.n_head_kv == 0
    assert {columns % BLOCK_VALUES for _, _, columns in shape.matrices()} == {0}
    assert shape.n_vocab > END_TOKEN


@pytest.mark.parametrize("name", [name for name in SHAPES if name.endswith("B")])
def test_a_name_says_how_many_parameters(name: str) -> None:
    claimed = float(name.removesuffix("B")) * 1e9
    assert find_shape(name).parameters == pytest.approx(claimed, rel=0.1)


@pytest.mark.parametrize("name", TINY)
def test_what_is_written_is_the_shape(name: str, tmp_path: Path) -> None:
    path, shape = make_random(name, tmp_path), find_shape(name)
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == {row[0] for row in [*shape.matrices(), *shape.vectors()]}
    for tensor, rows, columns in shape.matrices():
        assert found[tensor].tensor_type == gguf.GGMLQuantizationType.Q4_0
        assert [int(n) for n in found[tensor].shape] == [columns, rows]
    values = gguf.quants.dequantize(
        found["token_embd.weight"].data, found["token_embd.weight"].tensor_type
    )
    assert abs(values[END_TOKEN]).max() == 0, "greedy decoding never ends"
    assert 1 < values.std() * shape.n_embd**0.5 < 12


def test_an_output_layer_of_its_own_never_ends_a_reply_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = replace(find_shape("tiny-1"), name="tiny-untied", head_dim=32, tied=False)
    monkeypatch.setitem(SHAPES, shape.name, shape)
    reader = gguf.GGUFReader(make_random(shape.name, tmp_path))
    found = {tensor.name: tensor for tensor in reader.tensors}
    output = found["output.weight"]
    values = gguf.quants.dequantize(output.data, output.tensor_type)
    assert values.shape == (shape.n_vocab, shape.n_embd)
    assert abs(values[END_TOKEN]).max() == 0
    field = reader.get_field("llama.attention.head_count")
    assert field is not None
    assert field.contents() == shape.n_head == 4


def test_the_weights_of_a_name_stay_the_same(tmp_path: Path) -> None:
    """Figures of two runs are about the same model."""
    digest = hashlib.sha256()
    for tensor in gguf.GGUFReader(make_random("tiny-1", tmp_path)).tensors:
        digest.update(tensor.data.tobytes())
    assert digest.hexdigest() == "38dd91b2591a20486524a8a8a181de0c58ad011eee167555c7bd3083e614d0d7"


def test_weights_of_a_balanced_model_are_as_often_above_as_below_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = replace(find_shape("tiny-1"), tied=False)
    means: dict[tuple[str, bool], float] = {}
    stds: dict[tuple[str, bool], float] = {}
    for balanced in (False, True):
        shape = replace(base, name=f"tiny-{balanced}", balanced=balanced)
        monkeypatch.setitem(SHAPES, shape.name, shape)
        path = make_random(shape.name, tmp_path)
        assert path.stem.endswith("-v2") == balanced
        assert is_random(path)
        for tensor in gguf.GGUFReader(path).tensors:
            if tensor.name in ("blk.1.ffn_up.weight", "token_embd.weight"):
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                means[tensor.name, balanced] = values.mean() / values.std()
                stds[tensor.name, balanced] = values.std()
    # A 4-bit number less 8 has the mean -1/2 and the standard deviation 4.6.
    assert means["blk.1.ffn_up.weight", False] == pytest.approx(-0.108, abs=0.01)
    assert abs(means["blk.1.ffn_up.weight", True]) < 0.01
    assert stds["token_embd.weight", True] == pytest.approx(1, rel=0.02)
    assert find_shape("8B").balanced
    assert not is_random(tmp_path / "random.gguf")


def test_a_model_is_made_once(tmp_path: Path) -> None:
    first = make_random("tiny-1", tmp_path)
    before = first.stat().st_mtime_ns
    assert make_random("tiny-1", tmp_path) == first
    assert first.stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [first], "no half of it is left"


def test_a_disk_that_is_too_small_is_refused_with_numbers(tmp_path: Path) -> None:
    shape = find_shape("tiny-3")
    room = make_random(shape.name, tmp_path).stat().st_size
    assert 0 <= room - shape.n_bytes < 0.5 * room, "and what describes them"
    with small_tmpfs(tmp_path, 256 << 10) as small:
        with pytest.raises(ResourceExhausted) as caught:
            make_random(shape.name, small)
        assert not list(small.iterdir())
    assert caught.value.reason == "disk_short"
    assert caught.value.details["need_bytes"] == shape.n_bytes
    assert caught.value.details["free_bytes"] == 256 << 10


def test_an_unknown_size_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument) as caught:
        find_shape("13T")
    assert caught.value.info.details["sizes"] == list(SHAPES)


def test_without_gguf_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FailedPrecondition, match="pip install") as caught:
        random_models.make_random("tiny-1", tmp_path)
    assert caught.value.reason == "gguf_missing"


def test_copies_in_memory_are_measured() -> None:
    rates = copy_rates("cpu", 1 << 22, 3)
    assert rates["kind"] == "memcpy"
    assert 0 < rates["h2d_gb_s"] < 10_000


def test_the_command_prints_json_also_of_errors(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vram_conductor.worker.bench"]
    models = [*command, "models", "--folder", str(tmp_path), "tiny-2"]
    (row,) = json.loads(subprocess.run(models, capture_output=True, check=True).stdout)
    assert Path(row["path"]).stat().st_size == row["bytes"]
    bad = subprocess.run([*models[:-1], "13T"], capture_output=True)
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["error"]["reason"] == "unknown_size"


def test_the_watcher_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "vram_conductor.worker.bench", "memory", "--period-ms", "5"]
    process = subprocess.Popen(
        [*command, "--pid", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert [line["ms"] for line in lines] == sorted(line["ms"] for line in lines)
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
