"""What the parts of ``bench switch`` share: three models, their sizes, the reference rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vram_conductor.client.bench_bed import Bed
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import BenchModel, Setting
from vram_conductor.client.bench_sizes import Role, Sizes
from vram_conductor.protocol.values import DeviceKind

CONTEXT_TOKENS = {"cuda": 640, "cpu": 200}
N_CTX = {"cuda": 8192, "cpu": 1024}
N_CTX_LARGE = {"cuda": 65_536, "cpu": 4096}
"""Of the small model where its pool is to take the room of the other's weights and pool."""

BESIDE = 'lanes = "threads"'
"""For the worker's section: what is brought early needs threads, also on a cpu."""


@dataclass
class Switching:
    """What the parts of this bench share.

    Attributes:
        small, large: the two models that take turns; ``third`` streams beside them.
        reference: what the hardware copies, see the worker's ``bench rates``.
        one, two: sizes with one slot per pool, and with two for the small model's.
        full: sizes of the two models with a large context for the small one.
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
    full: Sizes

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

    def cast_full(self) -> list[Role]:
        """Two models; the small one's pool is so large that nothing of the other's fits beside."""
        return cast_full(self.small, self.large, self.setting.kind)

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


def cast_full(small: BenchModel, large: BenchModel, kind: DeviceKind) -> list[Role]:
    """See :class:`Switching`."""
    return [Role("a", small, N_CTX_LARGE[kind]), Role("b", large, N_CTX[kind])]
