"""``conductor bench pipeline`` on a real GPU: nearly all of the overlap that there can be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vram_conductor.client.bench_setting import ask_worker
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import ConductorError

MIB = 1 << 20

pytest.importorskip("cupy", reason="CuPy is not installed (extra: cuda or cuda13)")


@pytest.fixture
def bench(cuda: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run it as a user does; what it wrote. Its lines are shown with -s."""

    def run(*flags: str, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "pipeline.json"
        assert main(["bench", "pipeline", "--device", cuda, "--json", str(file), *flags]) == code
        value: dict[str, Any] = json.loads(file.read_text())
        return value

    return run


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_setting_reaches_97_percent_of_its_bound(
    slots: int, bench: Callable[..., dict[str, Any]], used_bytes: Callable[[], int]
) -> None:
    before = used_bytes()
    value = bench("--slots", str(slots), "--seconds", "120")
    assert used_bytes() - before < 4 * MIB
    found = {figure["key"]: figure for figure in value["figures"]}
    assert found["share"]["reached"] is True
    assert found["speedup"]["value"] > 1.8, "computation takes as long as transfer"
    assert found["single_share"]["value"] > 95
    (row,) = value["data"]["rows"]
    assert row["compute_ms"] == pytest.approx(row["transfer_ms"], rel=0.05)
    assert value["device_name"]


@pytest.mark.slow
def test_every_setting_of_the_grid_reaches_97_percent_of_its_bound(
    bench: Callable[..., dict[str, Any]],
) -> None:
    value = bench("--grid", "--repeats", "3", "--seconds", "300")
    rows = value["data"]["rows"]
    assert len(rows) == 28, value["notes"] + value["failures"]
    for row in rows:
        aimed = row["compute_ms"] / row["transfer_ms"]
        assert aimed == pytest.approx(row["aim"], rel=0.05)
        sys.stdout.write(
            f"{row['n_layers']} x {row['bytes_per_layer'] / MIB:g} MiB, C/T {aimed:.2f}: "
            f"{row['share']:.2%} of {row['bound']:.3f}x\n"
        )
    assert min(row["share"] for row in rows) >= 0.97


def test_more_than_the_device_has_is_refused_with_numbers(cuda: str) -> None:
    flags = ["--n-layers", "2", "--bytes-per-layer", str(1 << 42), "--slots", "2"]
    with pytest.raises(ConductorError) as caught:
        ask_worker("pipeline", "--device", cuda, *flags)
    assert caught.value.reason == "device_memory_short"
    assert caught.value.details["need_bytes"] == 2 << 42
    assert 0 < caught.value.details["free_bytes"] < 2 << 42
