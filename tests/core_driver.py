"""Plays the broker towards the worker's core in tests, and checks every answer's form.

It keeps transcripts as the broker does, from STARTED and RUN_TOKENS alone, and computes pool
shapes by the ledger's rule.

Lanes come in four kinds: ``inline``; ``lockstep``: threads, and every step ends when nothing is
under way, so that a test sees what it would see inline; ``free``: threads that go their own way;
``late``: no threads, but a dice says when something that is under way comes back.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from fake_engine import FakeDevice, FakeEngine, ModelSpec
from fake_store import MemoryStore
from owners import Owners

from vram_conductor.protocol.commands import (
    Budget,
    CancelRun,
    Command,
    Copied,
    Copy,
    Drain,
    Failed,
    Forget,
    Load,
    Loaded,
    Run,
    RunDone,
    RunTokens,
    Started,
    Unload,
    WorkerOk,
    WorkerWelcome,
)
from vram_conductor.protocol.errors import Unavailable
from vram_conductor.protocol.values import (
    AgentKey,
    ConversationKey,
    KVType,
    PoolShape,
    Sampling,
)
from vram_conductor.worker.core import Core
from vram_conductor.worker.engine import Engine
from vram_conductor.worker.lane import AHEAD, Errand, InlineLanes, Lanes, ThreadLanes
from vram_conductor.worker.preparing import Preparer
from vram_conductor.worker.store import Store
from vram_conductor.worker.streams import Joining

GREEDY = Sampling(temperature=0.0)
MS = 1_000_000
WORKER_EPOCH = 7
PATIENCE_S = 20.0
LanesKind = Literal["inline", "lockstep", "free", "late"]


def key(text: str) -> ConversationKey:
    """``agent`` or ``agent/conversation``."""
    agent, _, conversation = text.partition("/")
    return ConversationKey("local", agent, conversation or "main")


@dataclass
class Record:
    """A conversation as the broker knows it."""

    ids: list[int] = field(default_factory=list)
    version: int = 0
    sent_version: int | None = None


@dataclass
class Attempt:
    """A RUN and all that came back."""

    run: Run
    key: ConversationKey
    prompt: list[int] | None = None
    keep: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: RunDone | Failed | None = None

    @property
    def done(self) -> RunDone:
        assert isinstance(self.end, RunDone), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end


@dataclass
class AgentSpec:
    model: str
    n_ctx: int
    slots: int
    kv_type: KVType
    linger_s: int | None = None


class LateLanes:
    """Carries errands out when it is told to, in any order."""

    parallel = True
    ahead = AHEAD

    def __init__(self, dice: random.Random) -> None:
        self.under_way: list[Errand] = []
        self._dice = dice
        self._finished: list[Errand] = []

    def submit(self, errand: Errand) -> None:
        assert all(other.lane != errand.lane for other in self.under_way)
        self.under_way.append(errand)

    def go_on(self) -> bool:
        """Let some come back, or none; whether any did."""
        some = self._dice.randint(0, len(self.under_way))
        for _ in range(some):
            errand = self.under_way.pop(self._dice.randrange(len(self.under_way)))
            errand.carry_out(self._finished.append)
        return some > 0

    def oldest(self) -> None:
        """Let the one come back that has been under way for the longest."""
        self.under_way.pop(0).carry_out(self._finished.append)

    def finished(self) -> list[Errand]:
        done, self._finished = self._finished, []
        return done

    def wait(self) -> list[Errand]:
        while not self._finished:
            assert self.under_way
            self.go_on()
        return self.finished()

    def keep(self, names: Collection[str]) -> None:
        assert all(errand.lane in names for errand in self.under_way)

    def close(self) -> None:
        self.under_way.clear()


class Driver:
    """A core with a fake engine and a broker's view of it."""

    lanes_kind: ClassVar[LanesKind] = "inline"

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        budget_bytes: int = 100_000,
        store: MemoryStore | None = None,
        batch_tokens: int = 16,
        base_bytes: int = 0,
        slice_ms: int = 2000,
        epoch: int = 1,
        real_engine: Engine | None = None,
        real_store: Store | None = None,
        preparer: Preparer | None = None,
        lanes: LanesKind | None = None,
        joining: Joining | None = None,
        sleepable: bool = False,
        seed: int = 0,
    ) -> None:
        """``sleepable``: the fake engine's models and pools can sleep."""
        self.sleepable = sleepable
        self.kind = lanes or self.lanes_kind
        self.joining = joining
        self.dice = random.Random(seed)
        self.lanes: Lanes = InlineLanes()
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.real_engine, self.real_store = real_engine, real_store
        self.preparer = preparer
        self.specs = {spec.model: spec for spec in specs}
        self.device = FakeDevice(limit_bytes=budget_bytes - base_bytes)
        self.batch_tokens = batch_tokens
        self.engine = self._new_engine()
        self.store = store if store is not None else MemoryStore()
        self.base_bytes = base_bytes
        self.budget_bytes = budget_bytes
        self.slice_ms = slice_ms
        self.epoch = epoch
        self.agents: dict[AgentKey, AgentSpec] = {}
        self.records: dict[ConversationKey, Record] = {}
        self.attempts: dict[int, Attempt] = {}
        self.answers: dict[int, Any] = {}
        self.ended: set[int] = set()
        self.commands: dict[int, Command] = {}
        self._op = 0
        self.core = self._new_core()
        self.welcome()

    def _new_engine(self) -> FakeEngine:
        specs = list(self.specs.values())
        engine = FakeEngine(specs, self.device, self.batch_tokens, sleepable=self.sleepable)
        if self.kind == "free" and self.sleepable:
            # As on a GPU, weights wake on threads of their own, beside the moves that follow.
            engine.device_kind = "cuda"
        return engine

    def _new_core(self) -> Core:
        self.lanes.close()
        self.lanes = InlineLanes()
        if self.kind == "late":
            self.lanes = LateLanes(self.dice)
        elif self.kind != "inline":
            ahead = 1 if self.kind == "lockstep" else AHEAD
            self.lanes = ThreadLanes(lambda: self.woken.put(None), ahead)
        core = Core(
            self.real_engine or self.engine,
            self.real_store or self.store,
            worker_epoch=WORKER_EPOCH,
            clock=self.device.clock,
            draw_seed=lambda: 4242,
            budget_bytes=self.budget_bytes,
            base_bytes=self.base_bytes,
            batch_tokens=self.batch_tokens,
            slice_ns=self.slice_ms * MS,
            preparer=self.preparer,
            lanes=self.lanes,
            joining=self.joining,
            prefetch=self.kind in ("free", "late"),
        )
        Owners(core, self.device.violations)
        return core

    # --- commands -----------------------------------------------------------------------------

    def send(self, kind: type[Command], raw: Sequence[bytes] = (), **fields: Any) -> int:
        """Give the core a command; returns its op."""
        self._op += 1
        command = kind(broker_epoch=self.epoch, op=self._op, **fields)
        self.commands[self._op] = command
        if isinstance(command, Run):
            self.attempts[self._op] = Attempt(command, command.conversation)
        self.core.handle(command, raw, self.device.now_ns)
        if self.kind == "lockstep":
            self.core.settle()
        self.collect()
        return self._op

    def answer(self, op: int) -> Any:
        """The answer to a command, which may have to wait for what is under way."""
        deadline = time.monotonic() + PATIENCE_S
        while op not in self.answers:
            assert time.monotonic() < deadline, f"no answer to {self.commands[op]}"
            self.step()
        return self.answers[op]

    def shape(self, model: str, kv_type: KVType) -> PoolShape | None:
        """The pool's shape by the ledger's rule."""
        mine = [
            spec for spec in self.agents.values() if spec.model == model and spec.kv_type == kv_type
        ]
        if not mine:
            return None
        slots = min(len(mine), max(spec.slots for spec in mine))
        sizes = sorted((spec.n_ctx for spec in mine), reverse=True)[:slots]
        return PoolShape(sum(sizes), slots, kv_type)

    def sizes(self, model: str, shape: PoolShape) -> tuple[str, int, int]:
        """Path, and the estimates for weights and pool."""
        spec = self.specs[model]
        return spec.path, spec.weights_bytes, spec.pool_bytes(shape)

    def scratch(self, model: str, shape: PoolShape) -> int:
        """The estimate for what a live context takes beyond its pool."""
        return self.specs[model].scratch_bytes

    def identity(self, model: str) -> str:
        """``ModelInfo.model``."""
        return model

    def load(
        self,
        agent: str,
        model: str,
        n_ctx: int = 200,
        slots: int = 1,
        kv_type: KVType = "f16",
        budget_bytes: int | None = None,
        linger_s: int | None = None,
    ) -> Loaded | Failed:
        """LOAD an agent."""
        name = AgentKey("local", agent)
        before = self.agents.get(name)
        self.agents[name] = AgentSpec(model, n_ctx, slots, kv_type, linger_s)
        shape = self.shape(model, kv_type)
        assert shape is not None
        path, weights_bytes, pool_bytes = self.sizes(model, shape)
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        op = self.send(
            Load,
            agent=name,
            model=self.identity(model),
            path=path,
            shape=shape,
            n_ctx=n_ctx,
            state_bytes=16 + 4 * n_ctx,
            weights_bytes=weights_bytes,
            pool_bytes=pool_bytes,
            scratch_bytes=self.scratch(model, shape),
            budget_bytes=budget,
            linger_s=linger_s,
        )
        answer: Loaded | Failed = self.answer(op)
        if isinstance(answer, Failed):
            del self.agents[name]
            if before:
                self.agents[name] = before
        return answer

    def unload(self, agent: str) -> None:
        """UNLOAD an agent."""
        name = AgentKey("local", agent)
        spec = self.agents.pop(name, None)
        shape = self.shape(spec.model, spec.kv_type) if spec else None
        pool_bytes = self.sizes(spec.model, shape)[2] if spec and shape else 0
        op = self.send(Unload, agent=name, shape=shape, pool_bytes=pool_bytes)
        assert isinstance(self.answer(op), WorkerOk)
        for conversation in [item for item in self.records if item.agent_key == name]:
            del self.records[conversation]

    def budget(self, budget_bytes: int) -> None:
        """BUDGET; afterwards the device refuses to hold more."""
        self.budget_bytes = budget_bytes
        # A haul that is under way still keeps to the budget before.
        late = self.kind in ("free", "late")
        before = self.device.limit_bytes if late else self.device.allocated_bytes
        self.device.limit_bytes = max(before, budget_bytes - self.base_bytes)
        op = self.send(Budget, budget_bytes=budget_bytes)
        assert isinstance(self.answer(op), WorkerOk)
        assert self.device.allocated_bytes <= max(0, budget_bytes - self.base_bytes)
        self.device.limit_bytes = budget_bytes - self.base_bytes

    def forget(self, conversation: str) -> None:
        op = self.send(Forget, conversation=key(conversation))
        assert isinstance(self.answer(op), WorkerOk)
        self.records.pop(key(conversation), None)

    def fork(self, conversation: str, to: str) -> int:
        """COPY, and the record as it stands; returns its op."""
        record = self.records[key(conversation)]
        self.records[key(to)] = Record(list(record.ids), 1)
        return self.send(Copy, source=key(conversation), target=key(to))

    def copied(self, conversation: str, to: str) -> Copied:
        """COPY and its answer."""
        answer = self.answer(self.fork(conversation, to))
        assert isinstance(answer, Copied), answer
        return answer

    def run(self, conversation: str, *, full: bool = False, **fields: Any) -> int:
        """RUN; the transcript goes along where the core may lack it."""
        name = key(conversation)
        record = self.records.setdefault(name, Record())
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("max_tokens", 8)
        with_ids = full or (bool(record.ids) and record.sent_version != record.version)
        raw = [np.array(record.ids, "<i4").tobytes()] if with_ids else []
        return self.send(
            Run,
            raw,
            job=1000 + self._op,
            conversation=name,
            version=record.version,
            transcript_tokens=len(record.ids),
            n_raw=len(raw),
            **fields,
        )

    def cancel(self, op: int) -> None:
        self.send(CancelRun, run_op=op)

    def drain(self, drain_ms: int = 1000) -> int:
        return self.send(Drain, drain_ms=drain_ms)

    def welcome(self, epoch: int | None = None) -> None:
        """W_WELCOME with the conversations that the broker knows."""
        self.epoch = self.epoch if epoch is None else epoch
        message = WorkerWelcome(
            v=(1, 0),
            broker_epoch=self.epoch,
            heartbeat_ms=1000,
            conversations=list(self.records),
        )
        self.core.welcome(message, self.device.now_ns)
        self.collect()

    def restart_worker(self) -> None:
        """kill -9: everything on the device is gone, the store stays; agents come back."""
        self.lanes.close()
        for attempt in self.attempts.values():
            if attempt.end is None:
                attempt.end = Failed(
                    broker_epoch=0, op=0, worker_epoch=0, error=_LOST, job=attempt.run.job
                )
        self.device.allocated_bytes = self.device.pinned_bytes = self.store.lent_bytes = 0
        self.engine = self._new_engine()
        self.core = self._new_core()
        for record in self.records.values():
            record.sent_version = None
        self.welcome()
        agents, self.agents = self.agents, {}
        for name, spec in agents.items():
            self.load(
                name.agent,
                spec.model,
                spec.n_ctx,
                spec.slots,
                spec.kv_type,
                linger_s=spec.linger_s,
            )

    # --- time and answers ---------------------------------------------------------------------

    def step(self) -> bool:
        """One step of the core."""
        did = self.core.step(self.device.now_ns)
        did = self._come_back() or did
        if not self.core.hauling:
            self.core.residency.validate()
        self.collect()
        if not did:
            self.device.spend(1)
        return did

    def _come_back(self) -> bool:
        """Wait for what is under way: all of it, or for anything. Whether there was anything."""
        if not self.core.progress()[1]:
            return False
        if self.kind == "lockstep":
            self.core.settle()
        elif isinstance(self.lanes, LateLanes):
            return self.lanes.go_on()
        elif self.kind == "free":
            self.woken.get(timeout=PATIENCE_S)
            while not self.woken.empty():
                self.woken.get_nowait()
        return True

    def finish(self, *ops: int, steps: int = 20_000) -> list[Attempt]:
        """Step until these jobs (or all) have ended."""
        wanted = [self.attempts[op] for op in (ops or self.attempts)]
        for _ in range(steps):
            if all(attempt.end for attempt in wanted):
                return wanted
            self.step()
        raise AssertionError(f"jobs do not end: {[a.run.op for a in wanted if not a.end]}")

    def say(self, conversation: str, text: str, **fields: Any) -> Attempt:
        """Append text and run to the end."""
        op = self.run(conversation, prompt=text, **{"continue_": True, **fields})
        return self.finish(op)[0]

    def collect(self) -> None:
        """Take the outbox; check that what comes is in order and comes once."""
        for message, raw in self.core.take_outbox():
            data: Any = message
            assert (data.broker_epoch, data.worker_epoch) == (self.epoch, WORKER_EPOCH)
            msgspec.msgpack.encode(data)
            assert data.op not in self.ended, "something came after the end"
            attempt = self.attempts.get(data.op)
            if attempt is None:
                assert data.op not in self.answers, "answered twice"
                self.answers[data.op] = data
                continue
            assert data.job == attempt.run.job
            self._collect_run(attempt, data, raw)

    def _collect_run(self, attempt: Attempt, data: Any, raw: list[bytes]) -> None:
        record = self.records.setdefault(attempt.key, Record())
        if isinstance(data, Started):
            assert attempt.prompt is None
            fresh = np.frombuffer(raw[0], "<i4").tolist()
            attempt.keep = data.keep
            prompt = attempt.prompt = record.ids[: data.keep] + fresh
            assert len(prompt) == data.prompt_tokens
        elif isinstance(data, RunTokens):
            assert attempt.prompt is not None
            if data.ids and not attempt.ids:
                record.ids = list(attempt.prompt)
                record.version = record.sent_version = attempt.run.version + 1
            attempt.ids += data.ids
            attempt.text += data.text
            record.ids += data.ids
        else:
            assert isinstance(data, RunDone | Failed)
            attempt.end = data
            self.ended.add(data.op)
            usage = data.usage
            if usage is not None:
                assert usage.generated_tokens == len(attempt.ids)
                assert usage.state_version == attempt.run.version + bool(attempt.ids)
                assert usage.reused_tokens < max(1, usage.prompt_tokens)
                assert bool(usage.reprefilled_tokens) == bool(usage.reprefill_reason)


_LOST = Unavailable("worker_lost", "gone").info
