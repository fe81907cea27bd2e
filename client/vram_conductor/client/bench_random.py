"""Random lives of agents and leases: several walkers at once, each with names of its own.

A refusal is an answer like another here. Whatever else goes wrong, and every ledger that promises
more than its cap, is a problem.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vram_conductor.client.bench_bed import TURN_S, Bed, token_ids
from vram_conductor.client.bench_setting import BenchModel
from vram_conductor.client.reply import Reply
from vram_conductor.protocol.errors import Code, ConductorError
from vram_conductor.protocol.status import DeviceStatus
from vram_conductor.protocol.values import KVType

AGENTS = 3
RUNNING = 3
"""Of each walker, at most."""

LOOK_EVERY = 50
PROBLEMS_MAX = 20
VAIN = 0.1
"""Of the steps that must fail, so many are made all the same; others make room for such that can
do something."""

LARGE = 0.3
"""Of the leases, so many may be large enough to keep everybody else away."""

LEASE_S = 45.0
"""Longer than the broker waits for room: it says what is wrong."""

REFUSALS = frozenset(
    {
        Code.RESOURCE_EXHAUSTED,
        Code.OUT_OF_RANGE,
        Code.NOT_FOUND,
        Code.ALREADY_EXISTS,
        Code.CANCELLED,
        Code.ABORTED,
    }
)
"""What a request may be answered with when others have the memory, or the agent is gone."""

_EXPECTED = frozenset({"conversation_busy", "lease_timeout"})
"""Reasons with other codes that are refusals, too."""


@dataclass
class Walk:
    """What happened.

    Attributes:
        steps: how many steps were made.
        counts: by kind of step, and refusals by reason.
        problems: what must not happen, with its step.
    """

    steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def walk(
    bed: Bed,
    models: Sequence[BenchModel],
    *,
    n_ctx: int,
    steps: int,
    seed: int,
    seconds: float,
    walkers: int = 4,
    doing: Callable[[str, str], None] = lambda who, what: None,
) -> Walk:
    """So many random steps, or as many as fit into the time; nobody is registered afterwards.

    Args:
        n_ctx: of the largest agents.
        walkers: threads that share the steps.
        doing: told who is about to do what.
    """
    until_s = time.monotonic() + seconds
    each = [steps // walkers + (at < steps % walkers) for at in range(walkers)]
    all_of_them = [
        Walker(bed, models, f"w{at}", n_ctx, random.Random(seed + at), doing)
        for at in range(walkers)
    ]
    threads = [
        threading.Thread(target=walker.run, args=(count, until_s), daemon=True)
        for walker, count in zip(all_of_them, each, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = Walk()
    counts: Counter[str] = Counter()
    for walker in all_of_them:
        total.steps += walker.steps
        counts.update(walker.counts)
        total.problems += walker.problems
    total.counts = dict(counts)
    total.problems = total.problems[:PROBLEMS_MAX]
    return total


class Walker:
    """One thread's agents, leases and running jobs."""

    def __init__(
        self,
        bed: Bed,
        models: Sequence[BenchModel],
        name: str,
        n_ctx: int,
        draw: random.Random,
        doing: Callable[[str, str], None],
    ) -> None:
        self.steps: int = 0
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._bed, self._models, self._name, self._draw = bed, models, name, draw
        self._n_ctx, self._doing = n_ctx, doing
        self._agents: set[str] = set()
        self._leases: set[str] = set()
        self._running: list[Reply] = []
        self._acts: list[tuple[Callable[[], None], int]] = [
            (self._decode, 44),
            (self._collect, 20),
            (self._register, 12),
            (self._unregister, 5),
            (self._reset, 6),
            (self._cancel, 4),
            (self._lease, 3),
            (self._release, 6),
        ]

    def run(self, steps: int, until_s: float) -> None:
        """Make the steps, then leave nothing behind."""
        while self.steps < steps and time.monotonic() < until_s:
            self._try(self._next())
            self.steps += 1
            if self.steps % LOOK_EVERY == 0:
                self._try(self._look)
        while self._running:
            self._try(self._collect)
        while self._agents:
            self._try(self._unregister)
        while self._leases:
            self._try(self._release)

    def _next(self) -> Callable[[], None]:
        """Any step; mostly one that is not in vain."""
        acts, weights = zip(*self._acts, strict=True)
        act: Callable[[], None] = self._draw.choices(acts, weights)[0]
        if self._draw.random() < VAIN:
            return act
        if act == self._register and len(self._agents) == AGENTS:
            return self._decode
        if act == self._lease and self._leases:
            return self._release
        if not self._agents and act in (self._decode, self._unregister, self._reset):
            return self._register
        return act

    def _try(self, act: Callable[[], None]) -> None:
        name = act.__name__.removeprefix("_")
        self._doing(self._name, name)
        try:
            act()
            self.counts[name] += 1
        except ConductorError as error:
            if error.info.code in REFUSALS or error.reason in _EXPECTED:
                self.counts[f"{name}: {error.reason}"] += 1
            else:
                self._problem(f"{name}: {error.reason}: {error.info.message}")

    def _problem(self, text: str) -> None:
        self.problems.append(f"{self._name}, step {self.steps}: {text}")

    # --- steps --------------------------------------------------------------------------------

    def _register(self) -> None:
        names = [f"{self._name}-{at}" for at in range(AGENTS)]
        free = [name for name in names if name not in self._agents]
        name = self._draw.choice(free if free and self._draw.random() >= VAIN else names)
        kinds: list[KVType] = ["f16", "f16", "q8_0"]
        self._bed.conductor.register(
            name,
            self._draw.choice(self._models).path,
            n_ctx=self._n_ctx // self._draw.choice([1, 1, 2, 4]),
            kv_type=self._draw.choice(kinds),
            device=self._bed.device,
        )
        self._agents.add(name)

    def _pick(self) -> str:
        """One of its agents, mostly; now and then one that is not there."""
        if self._agents and self._draw.random() < 0.98:
            return self._draw.choice(sorted(self._agents))
        return f"{self._name}-nobody"

    def _decode(self) -> None:
        if len(self._running) >= RUNNING:
            self._collect()
        prompt = token_ids(self._draw.randint(1, 40), seed=self._draw.randrange(1000))
        conversation = self._draw.choice(["main", "main", "other"])
        tokens = self._draw.randint(1, 8)
        reply = self._bed.start(
            self._pick(),
            prompt,
            continue_=self._draw.random() < 0.8,
            conversation=conversation,
            max_tokens=tokens,
        )
        self._running.append(reply)

    def _collect(self) -> None:
        if self._running:
            at = self._draw.randrange(len(self._running))
            self._running.pop(at).result(TURN_S)

    def _cancel(self) -> None:
        if self._running:
            self._draw.choice(self._running).cancel()

    def _unregister(self) -> None:
        name = self._pick()
        self._agents.discard(name)
        self._bed.conductor.unregister(name)

    def _reset(self) -> None:
        self._bed.conductor.reset(self._pick(), self._draw.choice(["main", "other"]))

    def _lease(self) -> None:
        name = f"{self._name}-lease"
        share = self._draw.uniform(0.01, 0.3 if self._draw.random() < LARGE else 0.08)
        promised = self._bed.status().promised
        base_bytes = sum(line.bytes for line in promised.lines if line.key == "base")
        size = int(share * (promised.cap_bytes - base_bytes))
        self._bed.conductor.lease(
            name, size, ttl_s=self._draw.randint(1, 3), device=self._bed.device, timeout_s=LEASE_S
        )
        self._leases.add(name)

    def _release(self) -> None:
        if self._leases:
            name = self._leases.pop()
            self._bed.conductor.release_lease(name)

    def _look(self) -> None:
        self.problems += [
            f"{self._name}, step {self.steps}: {text}" for text in broken(self._bed.status())
        ]


def broken(device: DeviceStatus) -> list[str]:
    """What a device's books must never show, whatever was admitted by whom. *Pure.*"""
    cap, memory = device.promised.cap_bytes, device.memory
    found: list[str] = []
    # Agents wait for a lease that parks: it is promised beside what they were promised.
    parking = sum(lease.bytes for lease in device.leases if lease.park)
    promised = device.promised.promised_bytes - parking
    if promised > cap:
        found.append(f"{promised} bytes are promised of {cap}")
    if device.worker is None:
        found.append("the worker is gone")
    if memory is None:
        return found
    if memory.own_bytes + device.foreign_bytes > cap and not device.foreign_bytes:
        found.append(f"the worker has {memory.own_bytes} bytes of {cap}")
    # OK is said only when the room is there, and it stays there.
    held = all(lease.state == "held" for lease in device.leases)
    leased = sum(lease.bytes for lease in device.leases)
    if held and leased and memory.own_bytes + leased + device.foreign_bytes > cap:
        found.append(f"the worker has {memory.own_bytes} bytes of {cap}, and {leased} are leased")
    return found
