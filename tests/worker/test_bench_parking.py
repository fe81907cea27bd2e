"""The bench of parking and resuming, where there is no GPU: its figures add up."""

from __future__ import annotations

from pathlib import Path

from vram_conductor.worker.bench.parking import measure
from vram_conductor.worker.bench.random_models import make_random


def test_every_step_is_measured(tmp_path: Path) -> None:
    found = measure(make_random("tiny-1", tmp_path), "cpu", 1 << 20, 2)
    assert not found["pinned"]
    for name in ("first_park", "park", "first_resume", "resume"):
        figures = found[name]
        assert 0.5 * (1 << 20) < figures["bytes"] < 2 * (1 << 20)
        steps = sum(value for step, value in figures.items() if step.endswith("_ms"))
        assert steps > 0
        assert 0 < figures["gb_s"] < figures["copy_gb_s"]
    beside = found["side_by_side"]
    assert beside["park"]["bytes"] > beside["park_before"]["bytes"]
    assert beside["park_after_resume"]["bytes"] == beside["park"]["bytes"]
