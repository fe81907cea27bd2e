"""Agents come and go: LOAD, UNLOAD and budgets, all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from vram_conductor.protocol.commands import Load, Unload
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.dismissal import Dismissal
from vram_conductor.worker.job import Receipt
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.loader import given_up, waits
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.planner import Plan, plan_open, plan_shrink, plan_weights
from vram_conductor.worker.residency import Agent, PoolState, Residency, Weights, pool_key
from vram_conductor.worker.snapshot import world
from vram_conductor.worker.traffic import Haul, Traffic, touches
from vram_conductor.worker.world import Move

SCRATCH_SLACK_BYTES = 8 << 20
"""An estimate of scratch is at most so much above the truth."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """What is allocated for an agent; None: not yet."""

    weights_bytes: int | None = None
    pool_bytes: int | None = None
    scratch_bytes: int | None = None
    digest: str | None = None


Bringing = Generator[tuple[Sequence[Move], str], None, Sizes]
"""What a LOAD moves, in portions (moves, and the pool that is only reopened), and what comes of
it; each portion is planned on what the one before has left."""


@dataclass(frozen=True)
class _Before:
    """What a failed LOAD goes back to."""

    agent: Agent | None
    want: PoolShape | None
    want_bytes: int
    measured: bool


class Agents:
    """Admits and dismisses agents."""

    def __init__(
        self,
        residency: Residency,
        jobs: Jobs,
        mover: Mover,
        traffic: Traffic,
        clock: Callable[[], int],
        *,
        has_scratch: bool,
    ) -> None:
        """``has_scratch``: live contexts take memory beyond their buffers on this device.

        Attributes:
            dismissal: frees what no agent is left for.
        """
        self._residency = residency
        self._jobs = jobs
        self._mover = mover
        self._traffic = traffic
        self._clock = clock
        self._has_scratch = has_scratch
        self.dismissal = Dismissal(residency, jobs, mover, clock)

    def load(self, command: Load, done: Callable[[Sizes | Exception], None]) -> None:
        """Admit an agent; load its weights and pool as far as that takes nothing from anybody.
        Loading is a haul: others go on meanwhile.

        Args:
            done: called once with what came of it: a ConductorError of the engine's, or
                ``MEASURED``, leaves nothing of the agent behind.
        """
        before = self._note(command)
        self._mover.keep_promises()
        pool = self._residency.pools[pool_key(command.model, command.shape.kv_type)]
        self._advance(self._bring(pool), partial(self._undo, command, before), done, None)

    def _advance(
        self,
        bringing: Bringing,
        undo: Callable[[], None],
        done: Callable[[Sizes | Exception], None],
        error: Exception | None,
    ) -> None:
        """Begin the next portion. ``error``: what went wrong with the last one."""
        try:
            moves, reopen = bringing.throw(error) if error else next(bringing)
        except StopIteration as end:
            done(end.value)
            return
        except Exception as failure:
            undo()
            done(failure)
            return
        touched = touches(self._residency, moves)
        self._traffic.quiesce(touched[0])
        work = partial(self._mover.carry_out, moves, Receipt(), reopen=reopen)
        then = partial(self._advance, bringing, undo, done)
        self._traffic.begin(Haul(touched, work, then))

    def _note(self, command: Load) -> _Before:
        residency = self._residency
        weights = residency.weights.get(command.model)
        if weights is None:
            weights = Weights(command.model, command.path, command.weights_bytes)
            residency.weights[command.model] = weights
        elif not weights.measured:
            weights.bytes = command.weights_bytes
        slack_bytes = SCRATCH_SLACK_BYTES if weights.scratch_measured else 0
        if command.scratch_bytes > weights.scratch_bytes + slack_bytes:
            # More slots may need more; otherwise what was measured is the truth.
            weights.scratch_bytes, weights.scratch_measured = command.scratch_bytes, False
        weights.doomed, weights.leaves_ns = False, None
        weights.path = command.path
        if command.linger_s is not None:
            weights.used_ns = self._clock()
        key = pool_key(command.model, command.shape.kv_type)
        pool = residency.pools.get(key)
        before = _Before(
            residency.agents.get(command.agent),
            pool.want if pool else None,
            pool.want_bytes if pool else 0,
            pool.measured if pool else False,
        )
        if pool is None:
            pool = PoolState(key, weights, command.shape, command.pool_bytes)
            residency.pools[key] = pool
        self._reshape(pool, command.shape, command.pool_bytes)
        kv_type = command.shape.kv_type
        residency.admit(
            Agent(
                command.agent,
                command.model,
                kv_type,
                command.n_ctx,
                command.state_bytes,
                command.linger_s,
            )
        )
        residency.revision += 1
        return before

    def _reshape(self, pool: PoolState, want: PoolShape, want_bytes: int) -> None:
        """A new wanted shape; sizes that were measured for the same shape stay."""
        if pool.shape == want:
            pool.want_bytes, pool.measured = pool.open_bytes, True
        elif pool.want != want or not pool.measured:
            pool.want_bytes, pool.measured = want_bytes, False
        pool.want = want

    def _bring(self, pool: PoolState) -> Bringing:
        residency, weights = self._residency, pool.weights
        plan = plan_weights(world(residency, self._jobs, self._clock()), weights.model)
        if not isinstance(plan, Plan):
            log.info("weights of %s are not loaded yet: %s", weights.path, plan.reason)
            return Sizes()
        if plan.moves:
            yield plan.moves, ""
        assert weights.handle is not None
        digest = weights.handle.info.digest
        # One that is larger than it need be yet stays: the others of its agents may follow.
        if not pool.covers_want and not any(slot.job for slot in pool.slots):
            snapshot = world(residency, self._jobs, self._clock())
            opening = plan_open(snapshot, pool.key, gentle=True)
            if isinstance(opening, Plan):
                try:
                    yield opening.moves, pool.key
                except ConductorError as error:
                    # Others have the memory just now, or what cannot be woken was given up; it
                    # will be asked for at the first use.
                    if not waits(error) and not given_up(error):
                        raise
        fits = pool.shape == pool.want
        return Sizes(
            weights.bytes,
            pool.open_bytes if fits else None,
            weights.scratch_bytes if fits and self._knows_scratch(weights) else None,
            digest,
        )

    def _knows_scratch(self, weights: Weights) -> bool:
        return weights.scratch_measured or not self._has_scratch

    def _undo(self, command: Load, before: _Before) -> None:
        residency = self._residency
        pool = residency.pools[pool_key(command.model, command.shape.kv_type)]
        if before.agent is None:
            residency.dismiss(command.agent)
        else:
            residency.admit(before.agent)
        if before.want is not None:
            pool.want, pool.want_bytes = before.want, before.want_bytes
            pool.measured = before.measured
        self.dismissal.drop_unowned(pool)

    def unload(self, command: Unload) -> None:
        """Dismiss an agent whose jobs and conversations are gone already. Idempotent."""
        agent = self._residency.dismiss(command.agent)
        if agent is None:
            return
        pool = self._residency.pools[agent.pool]
        if command.shape is not None and agent.pool in self._residency.owned_pools():
            # A pool that is larger than wanted stays as it is until room is needed.
            self._reshape(pool, command.shape, command.pool_bytes)
        self.dismissal.drop_unowned(pool, agent.linger_s or 0)

    def released(self, weights: Weights) -> None:
        """Nobody reads its vocabulary any more: do what had to wait for that."""
        if weights.doomed:
            self.dismissal.drop_weights(weights)
        if self._residency.resident_bytes() > self._residency.budget_bytes:
            self.set_budget(self._residency.budget_bytes, self._clock())
        self._residency.revision += 1

    def set_budget(self, budget_bytes: int, now_ns: int) -> None:
        """Take a new budget and get down to it; jobs that lose their place wait. Not while
        anything is hauled."""
        if budget_bytes != self._residency.budget_bytes:
            self._residency.budget_bytes = budget_bytes
            # The broker waits for a sample from after it.
            self._residency.revision += 1
        while moves := plan_shrink(world(self._residency, self._jobs, now_ns)).moves:
            pools, _ = touches(self._residency, moves)
            if self._traffic.quiet(pools):
                try:
                    self._mover.carry_out(moves, Receipt())
                except ConductorError as error:
                    if not given_up(error):
                        raise
                    # It is being read; the rest goes when that is over, see released().
                    log.error("the budget is not kept yet: %s", error.info.message)
                return
            # What comes back may have ended jobs: that is another plan.
            self._traffic.quiesce(pools)
