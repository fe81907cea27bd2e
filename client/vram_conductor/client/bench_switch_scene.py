"""What the parts of ``bench switch`` share: three models, their sizes, the reference rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vram_conductor.client.bench_bed import Bed
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import BenchModel, Setting
from vram_conductor.client.bench_sizes import Role, Sizes

CONTEXT_TOKENS = {"cuda": 640, "cpu": 200}
N_CTX = {"cuda": 8192, "cpu": 1024}


@dataclass
class Switching:
    """What the parts of this bench share.

    Attributes:
        small, large: the two models that take turns; ``third`` streams beside them.
        reference: what the hardware copies, see the worker's ``bench rates``.
        one, two: sizes with one slot per pool, and with two for the small model's.
    """

    setting: Setting
    report: BenchReport
    say: Callable[[str], None]
    small: BenchModel
    large: BenchModel
    third: BenchModel
    reference: dict[str, Any]
    one: Sizes
    two: Sizes

    @property
    def n_ctx(self) -> int:
        return N_CTX[self.setting.kind]

    @property
    def tokens(self) -> int:
        return CONTEXT_TOKENS[self.setting.kind]

    def cast_one(self) -> list[Role]:
        """Three models, an agent and a slot each."""
        return cast_one(self.small, self.large, self.third, self.n_ctx)

    def cast_two(self) -> list[Role]:
        """Two agents with a slot each on the small model, one on the large one."""
        return cast_two(self.small, self.large, self.n_ctx // 2)

    def wanted(self, value: float) -> float | None:
        """Wishes are for a GPU."""
        return value if self.setting.on_cuda else None

    def add(self, key: str, what: str, value: float | None, unit: str, **more: Any) -> None:
        """One more row of the report."""
        self.report.add(Figure(key, what, value, unit, **more))

    def note_mechanism(self, bed: Bed) -> None:
        """Which mechanism the worker has, once."""
        status = bed.status()
        self.report.device_name = status.name
        if status.worker and "mechanism" not in self.report.data:
            self.report.data["mechanism"] = status.worker.mechanism
            note = f"mechanism: {status.worker.mechanism} ({status.worker.mechanism_note})"
            self.report.notes.append(note)


def cast_one(small: BenchModel, large: BenchModel, third: BenchModel, n_ctx: int) -> list[Role]:
    """See :class:`Switching`."""
    return [Role("a", small, n_ctx), Role("b", large, n_ctx), Role("c", third, n_ctx)]


def cast_two(small: BenchModel, large: BenchModel, n_ctx: int) -> list[Role]:
    """See :class:`Switching`."""
    roles = [Role(agent, small, n_ctx, slots=2) for agent in ("a1", "a2")]
    return [*roles, Role("b", large, n_ctx)]
