"""A broker core with scripted peers, all in one thread: no sockets, no clocks.

``Bench`` feeds events to a ``Core``, checks its invariants after each one and sorts the effects
by receiver. ``ScriptedWorker`` answers commands as a worker would, or keeps them in ``held`` until
the test says what to answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import msgspec

from vram_conductor.broker.core import Core
from vram_conductor.broker.effects import Append, Exit, Log, SendClient, SendWorker
from vram_conductor.broker.events import (
    ClientGone,
    ClientMessageIn,
    Event,
    Shutdown,
    Tick,
    WorkerGone,
    WorkerMessageIn,
)
from vram_conductor.broker.journal.records import Record
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import BrokerConfig, Config, DeviceConfig
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.drain import DrainDevice
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.keys import Role
from vram_conductor.protocol.tokens import pack_tokens, unpack_tokens
from vram_conductor.protocol.values import (
    ConversationKey,
    DeviceInfo,
    Memory,
    ModelInfo,
    PoolShape,
    Swap,
    Usage,
)

MIB = 1 << 20
MS = 1_000_000
PRINCIPAL = "local"
NO_SWAP = Swap()
M = TypeVar("M")


@dataclass(frozen=True)
class FakeModel:
    """Sizes of a made-up model: the pool takes ``cell_bytes`` per cell and ``compute_bytes``."""

    model: str
    weights_bytes: int = 100 * MIB
    cell_bytes: int = 16 * 1024
    compute_bytes: int = 4 * MIB
    fixed_state_bytes: int = 0
    n_ctx_train: int = 8192
    file_bytes: int = 90 * MIB

    def pool_bytes(self, cells: int) -> int:
        return cells * self.cell_bytes + self.compute_bytes

    def info(self, name: str) -> ModelInfo:
        return ModelInfo(
            model=self.model,
            name=name,
            path=f"/models/{name}.gguf",
            file_bytes=self.file_bytes,
            arch="llama",
            n_ctx_train=self.n_ctx_train,
            n_vocab=1000,
            chat_template=True,
        )


MODELS = {
    "small": FakeModel("m-small"),
    "other": FakeModel("m-other", weights_bytes=120 * MIB),
    "twin": FakeModel("m-small"),
    "short": FakeModel("m-short", n_ctx_train=2048),
    "stateful": FakeModel("m-stateful", fixed_state_bytes=8 * MIB),
    "huge": FakeModel("m-huge", weights_bytes=4096 * MIB, file_bytes=4000 * MIB),
}


@dataclass
class Job:
    """A RUN that the scripted worker has."""

    run: c.Run
    transcript: list[int]
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    started: bool = False


class ScriptedWorker:
    """One life of a worker process.

    Attributes:
        auto: command types that are answered at once; the others wait in ``held``.
        received: every command, in order.
        copied: what it answers to COPY.
        transcripts: what it has cached.
        key: the public half of its key; set it before ``ready``.
    """

    def __init__(
        self,
        bench: Bench,
        device: str = "cpu",
        *,
        epoch: int = 1,
        peer: bytes | None = None,
        kind: Any = "cpu",
        total_bytes: int = 1024 * MIB,
        base_bytes: int = 0,
    ) -> None:
        self.bench = bench
        self.device = device
        self.epoch = epoch
        self.peer = peer if peer is not None else f"w-{device}-{epoch}".encode()
        self.kind = kind
        self.total_bytes = total_bytes
        self.base_bytes = base_bytes
        self.auto: set[type] = {c.Estimate, c.Load, c.Unload, c.Forget, c.Copy, c.Budget}
        self.received: list[Any] = []
        self.held: list[Any] = []
        self.copied: dict[str, Any] = {"n_tokens": 5, "state_bytes": 500}
        self.jobs: dict[int, Job] = {}
        self.transcripts: dict[ConversationKey, list[int]] = {}
        self.parked: list[c.Parked] = []
        self.welcome: c.WorkerWelcome | None = None
        self.refused: ErrorInfo | None = None
        self.loaded_sizes: dict[str, Any] = {}
        self.seq = 0
        self.own_bytes = 0
        self.dead = False
        self.key = ""

    # --- from the broker ----------------------------------------------------------------------

    def receive(self, message: Any, raw: list[bytes]) -> None:
        self.received.append(message)
        if isinstance(message, c.WorkerWelcome):
            self.welcome = message
        elif isinstance(message, c.WorkerRefused):
            self.refused = message.error
        elif isinstance(message, c.Run):
            self._run(message, raw)
        elif type(message) in self.auto:
            self.answer(message)
        elif isinstance(message, c.Command):
            self.held.append(message)

    def answer(self, command: Any) -> None:
        """The answer of a worker where all goes well."""
        if command in self.held:
            self.held.remove(command)
        match command:
            case c.Estimate():
                self._estimate(command)
            case c.Load():
                self.reply(
                    command,
                    c.Loaded,
                    weights_bytes=self.loaded_sizes.get("weights_bytes", command.weights_bytes),
                    pool_bytes=self.loaded_sizes.get("pool_bytes", command.pool_bytes),
                )
            case c.Copy():
                self.reply(command, c.Copied, **self.copied)
            case _:
                if isinstance(command, c.Forget):
                    self.transcripts.pop(command.conversation, None)
                self.reply(command, c.WorkerOk)

    def _estimate(self, command: c.Estimate) -> None:
        model = MODELS.get(command.model)
        if model is None:
            self.fail(command, Code.NOT_FOUND, "no_such_model", f"no model {command.model!r}")
            return
        if command.cap_bytes is not None and model.file_bytes > command.cap_bytes:
            self.fail(
                command,
                Code.RESOURCE_EXHAUSTED,
                "file_exceeds_cap",
                "too large",
                file_bytes=model.file_bytes,
            )
            return
        if command.n_ctx > model.n_ctx_train:
            trained = {"n_ctx_train": model.n_ctx_train}
            self.fail(command, Code.OUT_OF_RANGE, "n_ctx_beyond_training", "too long", **trained)
            return
        fit = None
        if command.fit_bytes is not None:
            room = max(0, command.fit_bytes - model.compute_bytes)
            fit = room // model.cell_bytes // 256 * 256
        shape = command.shape
        self.reply(
            command,
            c.Estimated,
            model=model.info(command.model),
            shape=shape,
            weights_bytes=model.weights_bytes,
            pool_bytes=model.pool_bytes(shape.cells),
            kv_bytes=shape.cells * model.cell_bytes,
            compute_bytes=model.compute_bytes,
            state_bytes=command.n_ctx * model.cell_bytes + model.fixed_state_bytes,
            fit_cells=fit,
        )

    # --- to the broker ------------------------------------------------------------------------

    def say(self, message: Any, raw: Sequence[bytes] = ()) -> None:
        self.bench.post(WorkerMessageIn(self.peer, message, list(raw), key=self.key))

    def reply(self, command: Any, kind: Any, raw: Sequence[bytes] = (), **fields: Any) -> None:
        self.say(
            kind(
                broker_epoch=command.broker_epoch,
                op=command.op,
                worker_epoch=self.epoch,
                **fields,
            ),
            raw,
        )

    def fail(
        self, command: Any, code: Code, reason: str, message: str = "no", **details: Any
    ) -> None:
        if command in self.held:
            self.held.remove(command)
        error = ErrorInfo(code, reason, message, details=details)
        job = command.job if isinstance(command, c.Run) else 0
        self.reply(command, c.Failed, error=error, job=job)

    def ready(self, **changes: Any) -> None:
        ready = c.Ready(
            v=(1, 0),
            worker=f"worker-{self.device}",
            worker_epoch=self.epoch,
            pid=1000 + self.epoch,
            host="box",
            version="0.1.0",
            build="fake",
            device=DeviceInfo(
                device=self.device, kind=self.kind, name="fake", total_bytes=self.total_bytes
            ),
            memory=Memory(used_bytes=0, own_bytes=0, foreign_bytes=0),
            base_bytes=self.base_bytes,
            parked=self.parked,
        )
        self.say(msgspec.structs.replace(ready, **changes))

    def residency(
        self, foreign_bytes: int = 0, memory: Memory | None = None, **fields: Any
    ) -> None:
        """A report; it has ``own_bytes`` on the device."""
        self.seq += 1
        own = self.own_bytes
        memory = memory or Memory(
            used_bytes=own + foreign_bytes, own_bytes=own, foreign_bytes=foreign_bytes
        )
        self.say(
            c.Residency(
                broker_epoch=self.bench.broker_epoch,
                worker_epoch=self.epoch,
                seq=self.seq,
                memory=memory,
                **fields,
            )
        )

    def ping(self, **fields: Any) -> None:
        self.say(c.WorkerPing(n=1, steps=1, **fields))

    # --- jobs ---------------------------------------------------------------------------------

    def _run(self, run: c.Run, raw: list[bytes]) -> None:
        known = self.transcripts.get(run.conversation)
        if run.n_raw:
            known = unpack_tokens(raw[0])
        if known is None:
            self.fail(run, Code.FAILED_PRECONDITION, "transcript_missing")
            return
        assert len(known) == run.transcript_tokens
        self.transcripts[run.conversation] = known
        self.jobs[run.op] = Job(run, list(known))

    def job(self, agent: str, conversation: str = "main") -> Job:
        """The newest job of a conversation."""
        for job in reversed(self.jobs.values()):
            key = job.run.conversation
            if (key.agent, key.conversation) == (agent, conversation):
                return job
        raise AssertionError(f"no job of {agent}/{conversation} at the worker")

    def start(self, job: Job, prompt: Sequence[int] = (1, 2, 3), keep: int | None = None) -> None:
        keep = len(job.transcript) if keep is None else keep
        job.prompt, job.started = list(prompt), True
        job.transcript = job.transcript[:keep] + job.prompt
        self.reply(job.run, c.Started, [pack_tokens(prompt)], job=job.run.job, keep=keep, n_raw=1)

    def tokens(self, job: Job, text: str, ids: Sequence[int]) -> None:
        job.generated += ids
        self.reply(job.run, c.RunTokens, job=job.run.job, text=text, ids=list(ids))

    def done(self, job: Job, stop_reason: Any = "eos", swap: Swap = NO_SWAP, **fields: Any) -> None:
        self.jobs.pop(job.run.op, None)
        if job.generated:
            self.transcripts[job.run.conversation] = job.transcript + job.generated
        usage = Usage(generated_tokens=len(job.generated), stop_reason=stop_reason, swap=swap)
        self.reply(job.run, c.RunDone, job=job.run.job, usage=usage, **fields)

    def finish(self, job: Job, text: str = "hi", ids: Sequence[int] = (7, 8)) -> None:
        """The rest of a job: started, one piece of text, done."""
        if not job.started:
            self.start(job)
        self.tokens(job, text, ids)
        self.done(job)

    # --- looking ------------------------------------------------------------------------------

    def all(self, kind: type[M]) -> list[M]:
        """The received commands of one type."""
        return [message for message in self.received if isinstance(message, kind)]

    def waiting(self, kind: type[M]) -> M:
        """The only held command of one type."""
        found = [message for message in self.held if isinstance(message, kind)]
        assert len(found) == 1, f"{len(found)} commands {kind.__name__} are held"
        return found[0]

    def cancelled(self) -> list[int]:
        """run_ops that the broker wants stopped."""
        return [message.run_op for message in self.all(c.CancelRun)]


class Bench:
    """A core and its surroundings.

    Attributes:
        now_ns: the clock; ``advance`` moves it and sends the ticks.
        inbox: what each client was sent.
        records: the journal.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        broker_epoch: int = 100,
        restored: Restored | None = None,
        now_ns: int = 10**12,
        version: str = "",
    ) -> None:
        self.config = config or config_of()
        self.broker_epoch = broker_epoch
        self.now_ns = now_ns
        restored = restored or Restored()
        self.records: list[Record] = list(restored.records())
        self.core = Core(self.config, broker_epoch, restored, now_ns, version)
        self.inbox: dict[bytes, list[Any]] = defaultdict(list)
        self.logs: list[Log] = []
        self.exit_code: int | None = None
        self.workers: dict[bytes, ScriptedWorker] = {}
        self.gone: set[bytes] = set()
        self.gone_workers: set[bytes] = set()
        self.watch: Callable[[SendClient | SendWorker], None] | None = None
        self._posted: list[Event] = []
        self._busy = False
        self._rids = count(1)

    # --- events -------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Handle an event, now or after the one being handled."""
        self._posted.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._posted:
                self._handle(self._posted.pop(0))
        finally:
            self._busy = False

    def _handle(self, event: Event) -> None:
        if isinstance(event, ClientMessageIn):
            self.gone.discard(event.peer)
        if isinstance(event, WorkerMessageIn):
            self.gone_workers.discard(event.peer)
        effects = self.core.handle(event, self.now_ns)
        if self.exit_code is None:
            self.core.validate_state()
        for effect in effects:
            match effect:
                case SendClient(peer=peer, message=message):
                    assert peer not in self.gone, f"{message} to a client that is gone"
                    if self.watch is not None:
                        self.watch(effect)
                    self.inbox[peer].append(message)
                case SendWorker(peer=peer, message=command, raw=raw):
                    assert peer not in self.gone_workers, f"{command} to a worker that is gone"
                    if self.watch is not None:
                        self.watch(effect)
                    worker = self.workers.get(peer)
                    if worker is not None and not worker.dead:
                        worker.receive(command, raw)
                case Append(record=record):
                    self.records.append(record)
                case Log():
                    self.logs.append(effect)
                case Exit(code=code):
                    self.exit_code = code

    def tick(self) -> None:
        self.post(Tick())

    def turn(self) -> None:
        """The loop's next turn: a moment later."""
        self.now_ns += 1
        self.tick()

    def advance(self, ms: int, *, alive: bool = True, step_ms: int = 500) -> None:
        """Let time pass; ``alive``: clients and workers ping meanwhile."""
        end_ns = self.now_ns + ms * MS
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + step_ms * MS)
            if alive:
                for worker in list(self.workers.values()):
                    if not worker.dead and worker.welcome is not None and not worker.refused:
                        worker.ping()
                        worker.residency()
                for peer in [peer for peer in self.inbox if peer not in self.gone]:
                    self.post(
                        ClientMessageIn(peer, PRINCIPAL, same_user_ipc=True, message=m.Ping())
                    )
            self.tick()

    def shut_down(self, drain_ms: int = 1000) -> None:
        self.post(Shutdown(drain_ms))

    # --- workers ------------------------------------------------------------------------------

    def worker(self, device: str = "cpu", *, ready: bool = True, **options: Any) -> ScriptedWorker:
        """A new worker, which says READY."""
        worker = ScriptedWorker(self, device, **options)
        self.workers[worker.peer] = worker
        if ready:
            worker.ready()
        return worker

    def kill(self, worker: ScriptedWorker) -> None:
        """kill -9, noticed by the transport."""
        worker.dead = True
        self.gone_workers.add(worker.peer)
        self.post(WorkerGone(worker.peer))

    # --- clients ------------------------------------------------------------------------------

    def rid(self) -> bytes:
        return next(self._rids).to_bytes(16, "big")

    def client(self, name: str = "c1", principal: str = PRINCIPAL) -> Client:
        """A client with a session."""
        client = Client(self, name.encode(), principal)
        client.send(m.Hello(v=(1, 0)))
        return client

    def restart(self) -> Bench:
        """A new broker with this one's journal. Its workers and clients have to say hello."""
        restored = Restored(broker_epoch=self.broker_epoch)
        for record in self.records:
            restored.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record))
        return Bench(
            self.config,
            broker_epoch=self.broker_epoch + 1,
            restored=restored,
            now_ns=self.now_ns,
        )


class Client:
    """A client's connection."""

    def __init__(self, bench: Bench, peer: bytes, principal: str = PRINCIPAL) -> None:
        self.role: Role = "owner"
        self.bench = bench
        self.peer = peer
        self.principal = principal

    def send(self, message: Any) -> None:
        self.bench.post(
            ClientMessageIn(
                self.peer, self.principal, same_user_ipc=True, message=message, role=self.role
            )
        )

    def gone(self, *, dead: bool = False) -> None:
        """The transport notices that the client is gone; ``dead``: its process has ended."""
        self.bench.gone.add(self.peer)
        self.bench.post(ClientGone(self.peer, dead))

    def got(self, rid: bytes | None = None, kind: type[M] | None = None) -> list[Any]:
        """What it was sent, filtered."""
        return [
            message
            for message in self.bench.inbox[self.peer]
            if (rid is None or getattr(message, "rid", None) == rid)
            and (kind is None or isinstance(message, kind))
        ]

    def register(
        self, agent: str, model: str = "small", n_ctx: int | None = 1024, **fields: Any
    ) -> bytes:
        rid: bytes = fields.pop("rid", None) or self.bench.rid()
        self.send(m.Register(rid=rid, agent=agent, model=model, n_ctx=n_ctx, **fields))
        return rid

    def decode(self, agent: str, prompt: str = "x", **fields: Any) -> bytes:
        rid: bytes = fields.pop("rid", None) or self.bench.rid()
        self.send(m.Decode(rid=rid, agent=agent, prompt=prompt, **fields))
        return rid

    def drain(self, device: str = "cpu", **fields: Any) -> bytes:
        """DRAIN_DEVICE; returns its rid."""
        rid: bytes = fields.pop("rid", None) or self.bench.rid()
        self.send(DrainDevice(rid=rid, device=device, **fields))
        return rid

    def unregister(self, agent: str) -> bytes:
        rid = self.bench.rid()
        self.send(m.Unregister(rid=rid, agent=agent))
        return rid

    def reset(self, agent: str, conversation: str = "main", **fields: Any) -> bytes:
        rid = self.bench.rid()
        self.send(m.Reset(rid=rid, agent=agent, conversation=conversation, **fields))
        return rid

    def fork(self, agent: str, to: str, conversation: str = "main", **fields: Any) -> bytes:
        rid: bytes = fields.pop("rid", None) or self.bench.rid()
        self.send(Fork(rid=rid, agent=agent, conversation=conversation, to=to, **fields))
        return rid

    def history(self, agent: str, conversation: str = "main", **fields: Any) -> bytes:
        rid = self.bench.rid()
        self.send(History(rid=rid, agent=agent, conversation=conversation, **fields))
        return rid

    def ok(self, rid: bytes) -> dict[str, Any]:
        """Body of the only answer to ``rid``, which is OK."""
        answers = [a for a in self.got(rid) if not isinstance(a, m.Progress)]
        assert len(answers) == 1, answers
        assert isinstance(answers[0], m.Ok), answers[0]
        return answers[0].body

    def lease(self, name: str, lease_bytes: int = 0, **fields: Any) -> bytes:
        """LEASE; returns its rid."""
        rid = fields.pop("rid", None) or self.bench.rid()
        self.send(m.Lease(rid=rid, name=name, lease_bytes=lease_bytes, **fields))
        return rid

    def error(self, rid: bytes) -> ErrorInfo:
        """The error of the only ERROR of ``rid``."""
        errors = self.got(rid, m.Error)
        assert len(errors) == 1, self.got(rid)
        assert not self.got(rid, m.Ok)
        assert not self.got(rid, m.Done)
        error: ErrorInfo = errors[0].error
        return error

    def done(self, rid: bytes) -> Usage:
        """The receipt of the only DONE of ``rid``."""
        found = self.got(rid, m.Done)
        assert len(found) == 1, self.got(rid)
        assert not self.got(rid, m.Error)
        usage: Usage = found[0].usage
        return usage

    def text(self, rid: bytes) -> str:
        """The output so far; every piece once, in order."""
        pieces = self.got(rid, m.Tokens)
        assert [piece.seq for piece in pieces] == list(range(len(pieces)))
        return "".join(piece.text for piece in pieces)

    def silent(self, rid: bytes) -> bool:
        """Whether nothing final has come for ``rid``."""
        return not [a for a in self.got(rid) if isinstance(a, m.Ok | m.Error | m.Done)]


def config_of(*devices: DeviceConfig, **broker: Any) -> Config:
    """A configuration; one cpu device of 1 GiB unless others are given."""
    return Config(
        broker=BrokerConfig(**broker),
        device=list(devices) or [DeviceConfig(id="cpu", kind="cpu", capacity="1 GiB")],
    )


def shape_of(n_ctx: int, slots: int = 1) -> PoolShape:
    return PoolShape(-(-n_ctx // 256) * 256, slots)
