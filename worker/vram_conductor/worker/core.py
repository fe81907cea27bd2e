"""The worker's core: commands in, one step at a time, replies out.

One object on one thread, the engine thread, which makes all decisions. What takes time is carried
out on lanes (``lane``) and comes back to it. It knows no sockets and no clock of its own: time
comes in with each call, and ``clock`` only measures how long things take. Every command is
answered exactly once (CANCEL_RUN: by the end of its job), every RUN by one RUN_DONE or FAILED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vram_conductor.protocol.commands import (
    Command,
    Parked,
    WorkerOk,
    WorkerWelcome,
)
from vram_conductor.worker import deadlines
from vram_conductor.worker.adoption import adopt
from vram_conductor.worker.agents import Agents
from vram_conductor.worker.dispatch import Dispatch, draining
from vram_conductor.worker.ends import Ends
from vram_conductor.worker.engine import Engine
from vram_conductor.worker.finishing import Finishing
from vram_conductor.worker.health import Health
from vram_conductor.worker.job import Job, Receipt
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.lane import InlineLanes, Lanes
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.outbox import Outbox, Sent
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.prefetching import Prefetching
from vram_conductor.worker.preparing import InlinePreparer, Preparer, Preparing
from vram_conductor.worker.report import Report, adopted, report
from vram_conductor.worker.residency import Residency
from vram_conductor.worker.schedule import SLICE_NS
from vram_conductor.worker.seating import Seating
from vram_conductor.worker.shared_store import SharedStore
from vram_conductor.worker.steps import Steps
from vram_conductor.worker.store import Store
from vram_conductor.worker.streams import Joining, Streams
from vram_conductor.worker.traffic import Traffic
from vram_conductor.worker.turns import Turns

PARAMS = "unified"
"""Fingerprint of the context parameters that a parked state depends on."""


class Core:
    """The engine thread's object.

    Attributes:
        residency, jobs: who is where and what is to do; read them, don't change them.
        outbox: replies; the shell takes them after every call.
        busy: a step is being done that should count soon (not: a model is loading).
        drained: DRAIN has been answered; nothing more will be done.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        worker_epoch: int,
        clock: Callable[[], int],
        draw_seed: Callable[[], int],
        budget_bytes: int = 0,
        base_bytes: int = 0,
        batch_tokens: int = 64,
        params: str = PARAMS,
        slice_ns: int = SLICE_NS,
        preparer: Preparer | None = None,
        lanes: Lanes | None = None,
        joining: Joining | None = None,
        prefetch: bool = False,
    ) -> None:
        """``clock``: monotonic nanoseconds. ``draw_seed``: an unsigned 32-bit seed for a job
        that names none. ``batch_tokens``: the micro-batch, the most that one step computes.
        ``preparer``: makes prompts; without one they are made on the spot. ``lanes``: carry out
        what takes time; without them that is done on the spot, too. ``joining``: how tokens share
        messages; by default each has its own. ``prefetch``: bring early what may be wanted next;
        only of use on lanes."""
        self.residency = Residency(base_bytes, budget_bytes)
        self.jobs = Jobs()
        self.outbox = Outbox(worker_epoch)
        self.drained = False
        self._store = store = SharedStore(store)
        self._stepping = False
        self._broker_epoch: int | None = None
        self._tended = -1
        residency, jobs, outbox = self.residency, self.jobs, self.outbox
        self._traffic = traffic = Traffic(lanes or InlineLanes())
        self._health = Health()
        self._streams = Streams(outbox, joining or Joining())
        parking = Parking(residency, store, engine.build, params, clock)
        self._mover = mover = Mover(engine, residency, parking, store, clock)
        self._ends = ends = Ends(residency, jobs, parking, store, outbox, self._streams, traffic)
        traffic.landed = ends.settle
        cuda = engine.device_kind == "cuda"
        self._agents = Agents(residency, jobs, mover, traffic, clock, has_scratch=cuda)
        make, barred = preparer or InlinePreparer(), traffic.moves_weights
        self._preparing = Preparing(make, jobs, ends, draw_seed, self._agents.released, barred)
        self._wire(parking, clock, slice_ns, batch_tokens, prefetch=prefetch)
        adopt(residency, store, engine.build)

    def _wire(
        self,
        parking: Parking,
        clock: Callable[[], int],
        slice_ns: int,
        batch_tokens: int,
        *,
        prefetch: bool,
    ) -> None:
        """What decides what happens next."""
        residency, jobs, outbox = self.residency, self.jobs, self.outbox
        ends, mover, store, traffic = self._ends, self._mover, self._store, self._traffic
        preparing = self._preparing
        seating = Seating(residency, mover, parking, ends, outbox, clock, preparing, traffic)
        self._turns = turns = Turns(residency, jobs, preparing, seating, traffic, slice_ns)
        self._prefetching = (
            Prefetching(residency, jobs, mover, store, turns, traffic, clock) if prefetch else None
        )
        self._finishing = Finishing(mover, parking, ends, self._streams, self._health, clock)
        self._steps = Steps(jobs, traffic, self._finishing, clock, batch_tokens)
        self._dispatch = Dispatch(
            residency, jobs, self._agents, ends, parking, store, outbox, clock, preparing, traffic
        )

    # --- for the shell ------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Batches that have come back so far."""
        return self._finishing.count

    @property
    def hauling(self) -> bool:
        """Whether things are being moved: nobody can say what is where."""
        return self._traffic.haul is not None

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for a first token."""
        return any(not job.generated and job.verdict is None for job in self.jobs)

    def rest(self, wanted: bool) -> None:
        """``wanted``: begin no more moves, so that somebody can see what is where."""
        self._traffic.rests = wanted

    @property
    def broken(self) -> bool:
        """Whether nothing can be expected of this process any more."""
        return self._health.broken

    def progress(self) -> tuple[int, bool]:
        """A number that changes while nothing hangs, and whether it should: something is under
        way, or a step is being done (not: a model is loading). Any thread."""
        loading, parallel = self._mover.loading, self._traffic.parallel
        mark, waits = self._traffic.progress(patient=loading)
        return mark, waits or (self._stepping and (parallel or not loading))

    @property
    def revision(self) -> int:
        """Changes whenever :meth:`report` would say something new."""
        return self.residency.revision

    @property
    def swaps(self) -> int:
        """How often a conversation's KV was moved."""
        return self._mover.swaps

    @property
    def switches(self) -> int:
        """How often pools or weights had to go for something else."""
        return self._mover.switches

    def take_outbox(self) -> list[Sent]:
        """Replies since the last call."""
        return self.outbox.take()

    def report(self) -> Report:
        """What is where."""
        return report(self.residency, self._store, self._ends.where, self._mover.swaps)

    def adopted(self) -> list[Parked]:
        """Parked states, for READY."""
        return adopted(self._store)

    def wake_ns(self) -> int | None:
        """When :meth:`step` has something to do though no command came; None: never."""
        times = [deadlines.next_ns(self.jobs), self._streams.next_ns()]
        times += [self._agents.dismissal.next_ns()] if not self.hauling else []
        times += [self._dispatch.drain_ns] if self._dispatch.drains else []
        return min((at for at in times if at is not None), default=None)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        self._traffic.quiesce()

    # --- commands -----------------------------------------------------------------------------

    def welcome(self, message: WorkerWelcome, now_ns: int) -> None:
        """A broker answered READY. Whatever was under way is void; what it does not know is
        deleted; what is loaded waits for it to claim it with LOAD."""
        self.lose_session()
        self.settle()
        if self._broker_epoch not in (None, message.broker_epoch):
            # Nobody is left who could use what was said to the former one.
            self.outbox.take()
        self._agents.dismissal.disown_all(now_ns)
        self._broker_epoch = message.broker_epoch
        known = set(message.conversations)
        for key in list(self.residency.conversations):
            if key not in known:
                self._dispatch.forget(key)

    def cancel_all(self) -> None:
        """End all jobs, as soon as may be."""
        for job in self.jobs:
            self._ends.done(job, "cancelled")

    def lose_session(self) -> None:
        """Whatever is under way, nobody will hear of it."""
        self._dispatch.drop_deferred()
        self.cancel_all()

    def handle(self, command: Command, raw: Sequence[bytes], now_ns: int) -> None:
        """Take a command. A stale one, of another broker's life, is dropped."""
        if self._broker_epoch in (None, command.broker_epoch):
            self._dispatch.handle(command, raw, now_ns)

    # --- work ---------------------------------------------------------------------------------

    def step(self, now_ns: int) -> bool:
        """Take back what was carried out, place jobs, begin what can be computed. False if there
        is nothing more to do before something comes in, or back."""
        if self.drained:
            return False
        self._stepping = True
        try:
            self._streams.tick(now_ns)
            self._traffic.collect()
            self._preparing.collect()
            took = self._dispatch.go_on(now_ns)
            if not self.hauling:
                self._preparing.release()
            self._expire(now_ns)
            placed = self._turns.place(now_ns)
            stepped = self._steps.step(now_ns)
            self._go_on_draining(now_ns)
            more = took or placed or stepped
            if self._prefetching and self.outbox.waiting:
                # What there is to say goes first: planning ahead would hold it up.
                return True
            if not more:
                self._tend_lanes(now_ns)
            return more
        finally:
            self._stepping = False

    def _tend_lanes(self, now_ns: int) -> None:
        """What is not urgent: bring something early; end the lanes of pools that were closed."""
        if self._prefetching and not self.drained and not self._dispatch.drains:
            self._prefetching.go_on(now_ns)
        if not self.hauling and self._tended != self.residency.revision:
            self._tended = self.residency.revision
            self._traffic.retire([k for k, p in self.residency.pools.items() if p.handle])

    def _expire(self, now_ns: int) -> None:
        for job in deadlines.overdue(self.jobs, now_ns):
            self._ends.failed(job, deadlines.timed_out(job, self.why_waiting(job)))
        if not self.hauling:
            self._agents.dismissal.tidy(now_ns)

    def why_waiting(self, job: Job) -> str:
        """``slots``, ``cells``, ``bytes``, ``budget``; empty if it is not known to wait."""
        blocked = self._turns.blocked.get(job.seq)
        return blocked.reason if blocked else ""

    def _go_on_draining(self, now_ns: int) -> None:
        """Once nothing runs, or it has run for long enough: park everything and answer."""
        drains = self._dispatch.drains
        if not drains or (len(self.jobs) and now_ns < self._dispatch.drain_ns):
            return
        for job in self.jobs:
            self._ends.failed(job, draining())
        self._traffic.quiesce()
        for pool in self.residency.pools.values():
            self._mover.close_pool(pool, Receipt())
        self.drained = True
        self._traffic.retire(())
        for command in drains:
            self.outbox.reply(WorkerOk, command)
