"""``conductor bench pipeline --model`` on a real GPU: what it says of memory, speed and logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vram_conductor.client.bench_setting import ask_worker
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import ResourceExhausted

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


def figures(value: dict[str, Any]) -> dict[str, Any]:
    return {figure["key"]: figure for figure in value["figures"]}


def test_a_model_is_measured_beside_llama_cpp(
    bench: Callable[..., dict[str, Any]],
    random_model: Callable[[str], Path],
    used_bytes: Callable[[], int],
) -> None:
    before = used_bytes()
    value = bench(random_model("0.36B"), "--batch", "8", "--seconds", "15")
    assert used_bytes() - before < 4 * MIB
    found, data = figures(value), value["data"]
    assert found["beside"]["reached"] is True
    assert found["copy_cosine"]["value"] > 0.999
    rates = [row["tokens_s"] for row in data["batches"]]
    assert rates == sorted(rates), "a larger batch shares the same transfers"
    assert data["beside"].keys() == {"partial", "cpu", "all"}
    own = {row["batch"]: row["own_bytes"] for row in data["batches"]}
    for row in data["beside"]["partial"]["rows"]:
        assert row["used_bytes"] <= own[row["batch"]]
    for row in data["beside"]["all"]["rows"]:
        assert row["gpu_layers"] == -1
        assert row["used_bytes"] > data["model"]["pass_bytes"]


@pytest.mark.real
def test_a_real_models_logits_are_llama_cpps(
    bench: Callable[..., dict[str, Any]], smollm2: Path
) -> None:
    found = figures(bench(smollm2, "--batch", "1", "--seconds", "12"))
    # Its own 8-bit rounding decides what llama.cpp chooses on the same file.
    for key in ("cosine", "without", "copy_cosine", "copy_top1", "copy_greedy"):
        assert found[key]["reached"] is True, found[key]


@pytest.mark.slow
def test_an_8b_model_decodes_as_fast_as_it_travels(
    bench: Callable[..., dict[str, Any]], random_model: Callable[[str], Path]
) -> None:
    found = figures(bench(random_model("8B"), "--batch", "64", "--seconds", "200"))
    for key in ("cosine", "without", "bound_share", "growth", "prefill", "beside"):
        assert found[key]["reached"] is True, found[key]
    assert found["over_partial"]["value"] > 1


def test_what_does_not_fit_is_refused_and_given_back(
    cuda: str, random_model: Callable[[str], Path], used_bytes: Callable[[], int]
) -> None:
    before = used_bytes()
    model = ["--device", cuda, "--model", str(random_model("0.36B"))]
    with pytest.raises(ResourceExhausted) as raised:
        ask_worker("layers", *model, "--batches", "1000000", "--prompt-tokens", "8")
    assert raised.value.reason == "device_memory_short"
    assert used_bytes() - before < 4 * MIB
