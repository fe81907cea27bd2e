"""How many bytes agents take here, read off a conductor that has room for all of them.

A bench that needs room for exactly one of two models sets its stage's capacity from these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vram_conductor.client.bench_bed import Bed, open_bed, token_ids
from vram_conductor.client.bench_setting import BenchModel, Setting
from vram_conductor.protocol.status import DeviceStatus

CPU_CAPACITY_BYTES = 4 << 30
SLACK_BYTES = 40 << 20
"""For what differs between two starts of a worker, and for estimates that are a little over what
is measured later; less where the models are small."""


@dataclass(frozen=True)
class Role:
    """An agent of a bench; ``slots`` sequences of its model's pool."""

    agent: str
    model: BenchModel
    n_ctx: int
    slots: int = 1


@dataclass(frozen=True)
class ModelSizes:
    """One model with the pool of its agents, in bytes."""

    weights: int
    pool: int
    scratch: int
    state: int

    @property
    def movable(self) -> int:
        """What can leave the device."""
        return self.weights + self.pool


@dataclass(frozen=True)
class Sizes:
    """What a cast of agents takes.

    Attributes:
        base, foreign: CUDA context and libraries; what others use.
        models: by the model's name.
    """

    base: int
    foreign: int
    models: dict[str, ModelSizes]

    def capacity(self, together: Iterable[Iterable[str]]) -> int:
        """The least that holds any of these sets of models, and a slack that none else fits in.

        Args:
            together: names of the models that must fit at the same time.
        """
        sets = [sum(self.models[name].movable for name in names) for names in together]
        slack = min(SLACK_BYTES, min(size.movable for size in self.models.values()) // 4)
        scratch = sum(size.scratch for size in self.models.values())
        return self.base + self.foreign + scratch + max(sets) + slack


def roomy_bytes(setting: Setting) -> int:
    """A capacity for everything at once; 0 on cuda: the whole card."""
    return 0 if setting.on_cuda else CPU_CAPACITY_BYTES


def register(bed: Bed, cast: Sequence[Role]) -> None:
    """Register every role."""
    for role in cast:
        bed.conductor.register(
            role.agent, role.model.path, n_ctx=role.n_ctx, slots=role.slots, device=bed.device
        )


def survey(setting: Setting, casts: Sequence[Sequence[Role]]) -> list[Sizes]:
    """Sizes of every cast, each measured after a first reply of each of its agents."""
    with open_bed(setting, "reserve", roomy_bytes(setting)) as bed:
        return [_survey_one(bed, cast) for cast in casts]


def _survey_one(bed: Bed, cast: Sequence[Role]) -> Sizes:
    register(bed, cast)
    admitted = _lines(bed.status())
    for role in cast:
        bed.turn(role.agent, token_ids(64, seed=1))
    bed.rates()
    status = bed.status()
    lines = _lines(status)
    # Room must be enough for the estimate as well: that is what admission asks for.
    lines = {key: max(size, admitted.get(key, 0)) for key, size in lines.items()}
    models: dict[str, ModelSizes] = {}
    for role in cast:
        found = bed.agent(role.agent)
        models[role.model.name] = ModelSizes(
            weights=lines.get(f"weights:{found.model_id}", found.weights_bytes),
            pool=lines.get(f"pool:{found.model_id}@{found.kv_type}", found.pool_bytes),
            scratch=sum(
                size for key, size in lines.items() if key.startswith(f"scratch:{found.model_id}")
            ),
            state=found.state_bytes,
        )
    for role in cast:
        bed.conductor.unregister(role.agent)
    foreign = status.memory.foreign_bytes if status.memory else 0
    return Sizes(lines.get("base", 0), foreign if bed.device.startswith("cuda") else 0, models)


def _lines(status: DeviceStatus) -> dict[str, int]:
    """What is promised, by key."""
    return {line.key: line.bytes for line in status.promised.lines}
