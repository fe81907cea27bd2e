"""The bench of a model whose layers travel: what is compared, and the commands on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import Spec, make_model
from numpy.typing import NDArray
from quantised_models import Quantised, make_quantised

from vram_conductor.protocol.errors import InvalidArgument, OutOfRange
from vram_conductor.worker.bench.bench_memory import BenchMemory
from vram_conductor.worker.bench.decoding import (
    STEPS_MIN,
    WARM_UP,
    compare,
    decode_ms,
    greedy,
    random_tokens,
)
from vram_conductor.worker.bench.layers import describe, measure_layers
from vram_conductor.worker.bench.layers_agreement import IncompleteEngine, agree
from vram_conductor.worker.bench.layers_setting import BATCHES_CPU, BATCHES_CUDA, layers_setting
from vram_conductor.worker.bench.llama_reference import _Reference, measure_reference
from vram_conductor.worker.bench.llama_text import read_reference, write_reference
from vram_conductor.worker.bench.random_models import make_random
from vram_conductor.worker.bench.random_shapes import SHAPES, find_shape
from vram_conductor.worker.pipeline.forward import Batch

N_VOCAB = 50


class Echo:
    """An engine whose most likely next token is the token plus one; keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def step(self, batch: Batch) -> NDArray[np.float32]:
        self.batches.append(batch)
        return np.eye(N_VOCAB, dtype=np.float32)[(batch.tokens[batch.wanted] + 1) % N_VOCAB]


def test_sequences_decode_side_by_side_from_their_beginning() -> None:
    echo = Echo()
    took = decode_ms(echo.step, 3, N_VOCAB, steps=4, seconds=60)
    assert len(took) == 4
    assert len(echo.batches) == WARM_UP + 4
    for at, batch in enumerate(echo.batches):
        assert batch.positions.tolist() == [at] * 3
        assert batch.sequences.tolist() == [0, 1, 2]
        assert batch.wanted.tolist() == [0, 1, 2]
    assert any((batch.tokens != echo.batches[0].tokens).any() for batch in echo.batches)


def test_a_slow_engine_is_measured_a_little_all_the_same() -> None:
    echo = Echo()
    assert len(decode_ms(echo.step, 1, N_VOCAB, steps=16, seconds=0)) == STEPS_MIN


def test_greedy_goes_on_where_the_prompt_ends() -> None:
    echo = Echo()
    assert greedy(echo.step, [7, 8, 9], 4) == [10, 11, 12, 13]
    assert [batch.positions.tolist() for batch in echo.batches] == [[0, 1, 2], [3], [4], [5]]


def test_drawn_tokens_are_in_the_vocabulary_and_the_same_each_time() -> None:
    for n_vocab in (2, 50, 128_256):
        tokens = random_tokens(1000, n_vocab)
        assert tokens.min() >= 0
        assert tokens.max() < n_vocab
        assert np.array_equal(tokens, random_tokens(1000, n_vocab))


def test_logits_are_compared_position_by_position() -> None:
    rng = np.random.default_rng(1)
    ours = rng.normal(size=(4, 9)).astype(np.float32)
    same = compare(ours, ours.copy(), [1, 2, 3], [1, 2, 3])
    assert same.cosine_least == pytest.approx(1)
    assert same.cosine == pytest.approx(1)
    assert (same.top1_share, same.positions) == (1.0, 4)
    assert (same.greedy_equal, same.greedy_tokens) == (3, 3)
    theirs = ours.copy()
    theirs[2] = -theirs[2]
    shifted = compare(ours + 1e3, ours[::-1] + 1e3)
    assert shifted.cosine < 0.9, "what all logits have in common says nothing"
    other = compare(ours, theirs, [1, 2, 3, 4], [1, 2, 9, 4])
    assert other.cosine_least == pytest.approx(-1)
    assert other.cosine_median == pytest.approx(1)
    assert -1 < other.cosine < 1
    assert other.top1_share == 0.75
    assert other.greedy_equal == 2


def test_a_setting_takes_what_is_right_for_the_device() -> None:
    cpu, cuda = layers_setting("cpu", "m"), layers_setting("cuda:0", "m")
    assert (cpu.batches, cuda.batches) == (BATCHES_CPU, BATCHES_CUDA)
    assert cuda.prompt_tokens == 512
    given = layers_setting("cpu", "m", batches=[4, 1, 2, 4], n_ctx=64, prompt_tokens=9)
    assert (given.alone, given.together) == ([1], [4, 2])
    # In the order in which they are wanted, should the time be short.
    assert cuda.together == [512, 8, 64, 256, 2, 4, 16, 32, 128]
    assert (given.n_ctx, given.prompt_tokens) == (64, 9)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batches", [1, 0]), ("batches", [-3]), ("n_ctx", 8), ("prompt_tokens", -1), ("repeats", -1)],
)
def test_a_setting_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"must be .* or more") as raised:
        layers_setting("cpu", "m", **{name: value})
    assert raised.value.reason == "bad_value"


def test_a_cpu_has_no_device_memory() -> None:
    with BenchMemory("cpu") as memory:
        assert (memory.device, memory.name, memory.base_bytes) == ("cpu", "", 0)
        assert memory.grown_bytes() is None


def test_a_file_is_described_or_refused() -> None:
    found = describe(layers_setting("cpu", str(make_model(Spec(arch="qwen2", tied=False)))))
    assert (found["arch"], found["n_layer"], found["n_vocab"]) == ("qwen2", 4, 320)
    assert found["types"] == ["F32"]
    assert found["pass_bytes"] >= found["layer_bytes"] * 4


def test_what_resident_layers_are_worth_is_measured(tmp_path: Path) -> None:
    path = str(make_random("tiny-1", tmp_path))
    setting = layers_setting("cpu", path, batches=[1], resident_layers=2, n_ctx=64, prompt_tokens=4)
    found = measure_layers(setting)
    assert found.without_resident is not None
    assert found.model["random"]
    travels = found.without_resident["memory"]["streamed_bytes"]
    assert (
        travels - found.decode[0]["memory"]["streamed_bytes"]
        == found.decode[0]["memory"]["resident_bytes"]
    )


# --- with llama.cpp -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(make_quantised(Quantised(n_vocab=320)))


def test_our_logits_are_compared_with_llama_cpps(tiny: str, tmp_path: Path) -> None:
    said = write_reference(tiny, 1, 40, tmp_path)
    again, logits, copy = read_reference(tmp_path)
    assert again == said
    assert logits.shape == (40, 320)
    assert len(said.greedy) == 32
    assert said.itself.cosine > 0.999
    assert said.itself.greedy_tokens == 32
    assert copy is not None
    assert np.allclose(copy, logits), "it is float32 already"
    assert not list(tmp_path.glob("*.gguf")), "seven times the file is not left behind"
    setting = layers_setting(
        "cpu", tiny, batches=[1, 2, 3], n_ctx=64, prompt_tokens=8, repeats=1, seconds=60
    )
    found = measure_layers(setting, tmp_path)
    assert found.agreement is not None
    assert found.agreement.itself == said.itself
    assert found.agreement.without.cosine < 0.99, "a layer that is left out must be seen"
    assert found.phases.keys() == {
        "open engines",
        "agreement",
        "prefill",
        "batch 1",
        "larger batches",
    }
    for agreement in (found.agreement.same, found.agreement.copy):
        assert agreement is not None
        assert agreement.positions == 40
        assert agreement.cosine_least > 0.9999
        assert agreement.top1_share == 1
        assert agreement.greedy_equal == 32
    check_rows(found.decode, found.model["pass_bytes"])
    assert found.without_resident is None
    prefill = found.prefill
    assert len(prefill["serial_ms"]) == len(prefill["overlapped_ms"]) == 1
    assert prefill["bound"] >= 1
    units = found.model["units"]
    for name in ("serial", "overlapped"):
        spans = prefill[f"{name}_spans"]
        assert sorted(span.unit for span in spans if span.stream == "compute") == list(range(units))
        assert min(span.start_ms for span in spans) == 0


def check_rows(rows: list[dict[str, Any]], pass_bytes: int) -> None:
    assert [row["batch"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert min(row["step_ms"] + row["logits_ms"] + row["serial_ms"]) > 0
        assert min(row["transfer_ms"], row["compute_ms"]) > 0
        assert row["transfer_ms"] + row["compute_ms"] < 1.5 * max(row["serial_ms"])
        assert row["memory"]["streamed_bytes"] == pass_bytes
        assert row["memory"]["grown_bytes"] is None
    # KV of the engine for two and three: its share of the largest batch counts.
    assert rows[1]["own_bytes"] < rows[2]["own_bytes"] == rows[2]["memory"]["counted_bytes"]


def test_every_layer_of_a_balanced_model_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one of the recipe that the 8B is made by."""
    like = replace(find_shape("8B"), name="small", n_embd=256, n_ff=896, n_head_kv=1, n_layer=12)
    monkeypatch.setitem(SHAPES, "small", replace(like, n_vocab=2_048, head_dim=64))
    path = make_random("small", tmp_path)
    said = write_reference(str(path), 1, 24, tmp_path)
    said, theirs, copy = read_reference(tmp_path)
    assert len(set(said.greedy)) > 12, "what comes depends on what came"
    with IncompleteEngine.open(path, n_ctx=64, tokens_max=24, wanted_max=24) as engine:
        found = agree(engine, said, theirs, copy)
    assert found.same.cosine > 0.999
    assert found.copy is not None
    assert found.copy.cosine_least > 0.9999
    assert found.copy_itself is not None
    assert 0.999 < found.copy_itself.cosine_least < 1
    assert found.without.cosine < 0.98


def test_time_that_is_over_leaves_batches_out_and_says_so(tiny: str) -> None:
    setting = layers_setting("cpu", tiny, batches=[1, 2], n_ctx=64, prompt_tokens=4, seconds=0)
    found = measure_layers(setting)
    assert found.decode == []
    assert found.notes == ["no time was left for batch 1", "no time was left for batch 2"]
    assert len(found.prefill["serial_ms"]) == 1
    assert found.agreement is None


def test_a_batch_that_is_too_large_is_left_out_with_numbers(tiny: str) -> None:
    batches = [1, 2, 1 << 29, 1 << 30]
    setting = layers_setting("cpu", tiny, batches=batches, n_ctx=64, prompt_tokens=4, seconds=30)
    found = measure_layers(setting)
    assert [row["batch"] for row in found.decode] == [1, 2]
    (note,) = found.notes
    assert note.startswith("there was no memory for batch 536870912, 1073741824: ")
    assert "bytes are needed on the host" in note


def test_llama_cpp_is_measured_beside(tiny: str) -> None:
    found = measure_reference(
        tiny,
        "cpu",
        1,
        [(1, 0), (3, 0), (300, 0)],
        n_ctx=64,
        prompt_tokens=16,
        seconds=60,
        partial=False,
    )
    assert [row["batch"] for row in found["rows"]] == [1, 3]
    assert all(row["tokens_s"] > 0 for row in found["rows"])
    assert len(found["prefill_ms"]) == 3
    assert found["phases"].keys() == {"loads", "decode", "prefill"}
    assert found["notes"] == ["llama.cpp has at most 256 sequences, not 300"]


def test_as_many_layers_as_fit_go_to_the_gpu(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose use is known: what a context takes grows with its sequences."""
    loads: list[int] = []

    def used(reference: _Reference, sequences: int) -> int:
        return (100 + sequences) * 1000 + reference._gpu_layers * reference._each(sequences)

    def load(reference: _Reference, layers: int) -> None:
        if not loads or layers != reference._gpu_layers:
            loads.append(layers)
        reference._gpu_layers = layers

    def decode(reference: _Reference, sequences: int, limit: int, until: float) -> Any:
        taken = used(reference, sequences)
        return [1.0] if taken <= limit else [], taken

    monkeypatch.setattr(_Reference, "_load_with", load)
    monkeypatch.setattr(_Reference, "_decode", decode)
    monkeypatch.setattr(_Reference, "_prefill", lambda reference, count: [1.0])
    with _Reference(tiny, "cpu", 1, 64) as reference:
        # In the order of their worth; the last has no room for what it takes beside.
        wanted = {1: 2, 64: 3, 8: 1}
        rooms = [
            (batch, (100 + batch) * 1000 + layers * reference._each(batch) + 5)
            for batch, layers in wanted.items()
        ]
        found = reference.measure([*rooms, (2, 50_000)], 8, 60.0, partial=True)
    assert {row["batch"]: row["gpu_layers"] for row in found["rows"]} == wanted
    assert len(loads) <= 2 * (len(wanted) + 1)
    assert found["notes"] == [
        "batch 2: with 0 layers on the GPU llama.cpp uses 0 MiB there, and the pipeline 0 MiB"
    ]


def test_more_sequences_than_llama_cpp_has_are_refused(tiny: str) -> None:
    from vram_conductor.worker.llama.bare import BareModel, Room, sequences_max
    from vram_conductor.worker.llama.options import EngineOptions

    with BareModel(tiny, EngineOptions(threads=1), 0) as model:
        with pytest.raises(OutOfRange) as raised:
            model.open(Room(64, sequences=sequences_max() + 1))
        assert raised.value.reason == "too_many_sequences"
        assert model.tokenize("no tokenizer here") == []


def command(*arguments: str) -> Any:
    line = [sys.executable, "-m", "vram_conductor.worker.bench", *arguments]
    return json.loads(subprocess.run(line, capture_output=True, stdin=subprocess.DEVNULL).stdout)


def test_the_commands_print_json_also_of_errors(tmp_path: Path) -> None:
    path = str(make_random("tiny-1", tmp_path))
    said = command("layers-text", "--model", path, "--folder", str(tmp_path), "--threads", "1")
    assert said["text"], "its vocabulary has all bytes"
    assert len(said["tokens"]) == 256
    small = ["--model", path, "--n-ctx", "32", "--prompt-tokens", "4"]
    found = command("layers", *small, "--batches", "1,2", "--reference", str(tmp_path))
    assert [row["batch"] for row in found["decode"]] == [1, 2]
    assert found["agreement"]["copy"]["greedy_equal"] == 32
    beside = command("layers-beside", *small, "--batches", "1:0,2:0", "--threads", "1")
    assert [row["batch"] for row in beside["rows"]] == [1, 2]
    assert command("layers", "--model", path, "--describe")["model"]["n_layer"] == 4
    for flags, reason in (
        (["--batches", "1,0"], "bad_value"),
        (["--batches", "one"], "bad_value"),
        (["--window-layers", "5"], "bad_window"),
        (["--resident", "9"], "bad_resident"),
    ):
        told = command("layers", "--describe", "--model", path, *flags)
        assert told["error"]["reason"] == reason, flags
    wrong = command("layers", "--model", path, "--device", "tpu:0")
    assert wrong["error"]["reason"] == "no_such_device"
    mamba = str(make_model(Spec(arch="mamba")))
    error = command("layers", "--model", mamba, "--describe")["error"]
    assert error["reason"] == "unsupported_architecture"
