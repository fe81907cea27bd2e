"""The benches on a cpu device with tiny models: structure and sanity, not speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vram_conductor.client.cli import main

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three tiny random models, made by the product's own maker."""
    from vram_conductor.client.bench_setting import random_models

    found = random_models(["tiny-1", "tiny-2", "tiny-3"], tmp_path_factory.mktemp("models"))
    return [model.path for model in found]


def bench(verb: str, models: list[str], folder: Path, *more: str) -> dict[str, Any]:
    """Run a bench as a user does; what it wrote."""
    file = folder / f"{verb}.json"
    flags = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--json", str(file)]
    assert main(["bench", verb, *flags, *more, "--models", *models]) == 0
    value: dict[str, Any] = json.loads(file.read_text())
    assert value["bench"] == verb
    assert value["device"] == "cpu"
    return value


def figures(value: dict[str, Any]) -> dict[str, Any]:
    return {figure["key"]: figure for figure in value["figures"]}


def test_parallel_counts_the_same_tokens_both_ways(models: list[str], tmp_path: Path) -> None:
    value = bench("parallel", models, tmp_path)
    found = figures(value)
    assert found["ratio"]["value"] > 0
    assert found["ratio"]["wanted"] is None, "a cpu owes no gain"
    assert len(value["data"]["timelines"]) == 2
    for streams in value["data"]["timelines"]:
        assert [stream["tokens"][-1] for stream in streams] == [24, 24, 24]
