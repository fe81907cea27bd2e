"""The bench of a model whose layers travel: what is measured, and the commands on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import Spec, make_model
from quantised_models import Quantised, make_quantised

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.bench.bench_memory import BenchMemory
from vram_conductor.worker.bench.decoding import STEPS_MIN
from vram_conductor.worker.bench.layers import describe, measure_layers
from vram_conductor.worker.bench.layers_agreement import IncompleteEngine, agree
from vram_conductor.worker.bench.layers_setting import BATCHES_CPU, BATCHES_CUDA, layers_setting
from vram_conductor.worker.bench.llama_text import read_reference, write_reference
from vram_conductor.worker.bench.random_models import make_random
from vram_conductor.worker.bench.random_shapes import SHAPES, find_shape


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
        "copy rates",
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


def test_where_time_is_short_fewer_positions_are_compared(tiny: str, tmp_path: Path) -> None:
    said = write_reference(tiny, 1, 40, tmp_path)
    part = said.first(16, 4)
    assert (part.tokens, part.greedy) == (said.tokens[:16], said.greedy[:4])
    _, theirs, copy = read_reference(tmp_path)
    assert copy is not None
    with IncompleteEngine.open(tiny, n_ctx=64, tokens_max=40, wanted_max=40) as engine:
        found = agree(engine, part, theirs[:16], copy[:16])
    for agreement in (found.same, found.copy):
        assert agreement is not None
        assert agreement.cosine_least > 0.9999
        assert (agreement.positions, agreement.greedy_equal, agreement.greedy_tokens) == (16, 4, 4)


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


def test_the_first_batch_is_measured_when_time_is_over_and_what_is_left_out_is_said(
    tiny: str, tmp_path: Path
) -> None:
    write_reference(tiny, 1, 40, tmp_path)
    setting = layers_setting("cpu", tiny, batches=[1, 2, 4], n_ctx=64, prompt_tokens=4, seconds=0)
    found = measure_layers(setting, tmp_path)
    assert [row["batch"] for row in found.decode] == [1]
    assert len(found.decode[0]["step_ms"]) == STEPS_MIN
    assert len(found.prefill["serial_ms"]) == 1
    assert found.agreement is None
    batches, agreement = found.notes
    assert batches == "no time was left for batch 2, 4"
    assert agreement.startswith("no time was left for the logits beside llama.cpp's: all ")


def test_time_is_kept_back_for_the_check(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many batches that would take longer than there is time; opening is quick here. Time is what
    this process computes: on a busy machine a clock's would pass between any two passes."""
    monkeypatch.setattr(time, "monotonic", time.process_time)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    write_reference(tiny, 1, 8, tmp_path)
    batches = list(range(1, 250))
    setting = layers_setting(
        "cpu", tiny, batches=batches, n_ctx=64, prompt_tokens=4, repeats=1, seconds=5
    )
    found = measure_layers(setting, tmp_path)
    assert found.agreement is not None
    measured = [row["batch"] for row in found.decode]
    assert {1, 249, 8, 64} <= set(measured)
    (note,) = found.notes
    left_out = sorted(set(batches) - set(measured))
    assert note == f"no time was left for batch {', '.join(map(str, left_out))}"


def test_a_batch_that_is_too_large_is_left_out_with_numbers(tiny: str) -> None:
    batches = [1, 2, 1 << 29, 1 << 30]
    setting = layers_setting("cpu", tiny, batches=batches, n_ctx=64, prompt_tokens=4, seconds=30)
    found = measure_layers(setting)
    assert [row["batch"] for row in found.decode] == [1, 2]
    (note,) = found.notes
    assert note.startswith("there was no memory for batch 536870912, 1073741824: ")
    assert "bytes are needed on the host" in note


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
