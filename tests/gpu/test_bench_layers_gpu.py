"""``conductor bench pipeline --model`` on a real GPU: what it says of memory, speed and logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vram_conductor.client.bench_setting import ask_worker
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.bench.random_models import make_random
from vram_conductor.worker.bench.random_shapes import SHAPES, find_shape

MIB = 1 << 20

pytest.importorskip("cupy", reason="CuPy is not installed (extra: cuda or cuda13)")


@pytest.fixture
def bench(cuda: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run it as a user does on a file; what it wrote. Its lines are shown with -s."""

    def run(model: Path, *flags: str) -> dict[str, Any]:
        file = tmp_path / "layers.json"
        flags = ("--model", str(model), "--json", str(file), *flags)
        code = main(["bench", "pipeline", "--device", cuda, *flags])
        value: dict[str, Any] = json.loads(file.read_text())
        assert code == 0, value["failures"]
        return value

    return run


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of a gigabyte by the recipe of the 8B: every layer matters, and it can be seen."""
    narrow = replace(find_shape("8B"), name="narrow", n_embd=1_024, n_ff=3_584, n_head_kv=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "narrow", replace(narrow, n_layer=12, n_vocab=16_384))
        return make_random("narrow", tmp_path_factory.mktemp("balanced"))


@pytest.fixture
def real_model(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M. A skip where it is not: it cannot be fetched on every machine with a GPU, and
    the suite on a CPU fails without it."""
    try:
        path: Path = request.getfixturevalue("smollm2")
    except pytest.fail.Exception as missing:
        pytest.skip(str(missing))
    return path


def figures(value: dict[str, Any]) -> dict[str, Any]:
    return {figure["key"]: figure for figure in value["figures"]}


def test_a_model_is_measured_beside_llama_cpp(
    bench: Callable[..., dict[str, Any]], balanced: Path, used_bytes: Callable[[], int]
) -> None:
    before = used_bytes()
    value = bench(balanced, "--batch", "8", "--seconds", "60")
    assert used_bytes() - before < 4 * MIB
    found, data = figures(value), value["data"]
    # What random weights choose is often a matter of the last digits.
    for key in ("cosine", "without", "copy_cosine", "beside"):
        assert found[key]["reached"] is True, found[key]
    rows = data["batches"]
    assert [row["batch"] for row in rows] == [1, 2, 4, 8], value["notes"]
    rates = [row["tokens_s"] for row in rows]
    assert rates == sorted(rates), "a larger batch shares the same transfers"
    assert data["beside"].keys() == {"partial", "cpu", "all"}
    own = {row["batch"]: row["own_bytes"] for row in rows}
    for row in data["beside"]["partial"]["rows"]:
        assert row["used_bytes"] <= own[row["batch"]]
    assert data["beside"]["all"]["rows"], value["notes"]
    for row in data["beside"]["all"]["rows"]:
        assert row["gpu_layers"] == -1
        assert row["used_bytes"] > data["model"]["pass_bytes"]


@pytest.mark.real
def test_a_real_models_logits_are_llama_cpps(cuda: str, real_model: Path, tmp_path: Path) -> None:
    """Its own 8-bit rounding decides what llama.cpp chooses on the same file."""
    model = "--model", str(real_model)
    ask_worker("layers-text", *model, "--folder", str(tmp_path))
    options = "--device", cuda, "--batches", "1", "--reference", str(tmp_path)
    found = ask_worker("layers", *model, *options)["agreement"]
    assert found["text"]
    assert found["same"]["cosine"] > 0.999
    assert found["without"]["cosine"] < 0.99
    assert found["copy"]["cosine_least"] > 0.999
    assert found["copy"]["top1_share"] >= 0.98
    assert found["copy"]["greedy_equal"] == found["copy"]["greedy_tokens"] == 32


def test_what_there_is_no_memory_for_is_left_out_and_given_back(
    cuda: str, random_model: Callable[[str], Path], used_bytes: Callable[[], int]
) -> None:
    before = used_bytes()
    model = ["--device", cuda, "--model", str(random_model("tiny-1"))]
    options = ["--batches", "1,30000000", "--prompt-tokens", "8", "--n-ctx", "256"]
    value = ask_worker("layers", *model, *options)
    assert [row["batch"] for row in value["decode"]] == [1]
    (note,) = value["notes"]
    assert note.startswith("there was no memory for batch 30000000: ")
    with pytest.raises(ResourceExhausted) as raised:
        ask_worker("layers", *model, "--batches", "1", "--prompt-tokens", "1000000000")
    assert raised.value.reason in ("device_memory_short", "host_memory_short")
    assert used_bytes() - before < 4 * MIB
