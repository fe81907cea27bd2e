"""Random steps as the leak bench makes them, on the real system with a cap that is tight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vram_conductor.client.bench_bed import open_bed
from vram_conductor.client.bench_random import REFUSALS, Walker, walk
from vram_conductor.client.bench_setting import Setting, random_models
from vram_conductor.client.bench_sizes import Role, survey
from vram_conductor.protocol.errors import Internal, OutOfRange

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_a_walk_breaks_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    models = random_models(["tiny-1", "tiny-2", "tiny-3"], tmp_path)
    setting = Setting("cpu", models, threads=1)
    (sizes,) = survey(setting, [[Role(f"r{model.name}", model, 512) for model in models]])
    capacity = sizes.capacity([[model.name] for model in models])
    with open_bed(setting, "timeshare", capacity) as bed:
        found = walk(bed, models, n_ctx=512, steps=160, seed=5, seconds=300, walkers=3)
        assert found.problems == []
        assert found.steps == 160
        assert found.counts["decode"] > 20
        assert found.counts["collect"] > 10
        assert found.counts["register"] > 3
        vain = [n for what, n in found.counts.items() if what.endswith("no_such_agent")]
        assert sum(vain) < found.steps // 8, "most steps are made by agents that exist"
        report = bed.conductor.status()
        assert report.agents_total == 0
        lines = {line.key for line in bed.status().promised.lines if line.bytes}
        assert lines <= {"base"}, "no weights, no pool, no lease is promised any more"


def test_what_is_no_refusal_is_a_problem() -> None:
    """Otherwise the bench would walk happily over a broken system."""
    walker = Walker.__new__(Walker)
    walker.steps, walker.problems, walker._name = 7, [], "w0"
    walker.counts, walker._doing = Counter(), lambda who, what: None

    def fails(error: Exception) -> Any:
        def _act() -> None:
            raise error

        return _act

    walker._try(fails(OutOfRange("too_large", "never fits")))
    assert walker.problems == []
    assert walker.counts["act: too_large"] == 1
    walker._try(fails(Internal("load_failed", "cudaMalloc failed")))
    assert walker.problems == ["w0, step 7: act: load_failed: cudaMalloc failed"]
    assert Internal.code not in REFUSALS
