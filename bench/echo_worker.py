"""A worker that computes nothing: it answers every command and streams made-up tokens.

    python bench/echo_worker.py --workers ipc:///path [--device cpu] [--rate 1000]

Every piece of output is the monotonic clock in nanoseconds at its sending, so whoever receives it
on the same machine knows how long it was on the way. ``--rate`` is in pieces per second and job; 0
is as fast as the broker takes them. ``max_tokens`` of the DECODE is how many pieces come.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from echo_sizes import ready, sizes

from vram_conductor.protocol import codec, sockets
from vram_conductor.protocol.commands import (
    Budget,
    CancelRun,
    Command,
    Copied,
    Copy,
    Drain,
    Estimate,
    Estimated,
    Failed,
    Forget,
    Load,
    Loaded,
    NoSession,
    Residency,
    Run,
    RunDone,
    RunTokens,
    Started,
    Unload,
    WorkerBye,
    WorkerOk,
    WorkerPing,
    WorkerWelcome,
)
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.key_files import load_key
from vram_conductor.protocol.sockets import SendResult
from vram_conductor.protocol.tokens import pack_tokens
from vram_conductor.protocol.values import ConversationKey, Memory, Usage

PIECES_PER_TURN = 16
TOKEN = 7
SECOND_NS = 1_000_000_000
DRAIN_MARGIN_NS = 200_000_000


@dataclass
class Job:
    """A RUN in progress."""

    run: Run
    transcript: bytes
    pieces: int
    started_ns: int
    sent: int = 0
    stop: bool = False


@dataclass
class EchoWorker:
    """One worker process's state.

    Attributes:
        device: id of the device that it claims to own.
        rate: pieces per second and job; 0 is no limit.
    """

    socket: sockets.Socket
    device: str
    rate: float
    epoch: int = field(default_factory=time.time_ns)
    broker_epoch: int = 0
    heartbeat_ns: int = SECOND_NS
    jobs: dict[int, Job] = field(default_factory=dict)
    transcripts: dict[ConversationKey, bytes] = field(default_factory=dict)
    waiting: deque[list[bytes]] = field(default_factory=deque)
    beat_at_ns: int = 0
    seq: int = 0
    draining: Drain | None = None
    leave_at_ns: int = 0
    over: bool = False

    def run(self) -> None:
        """Serve until DRAIN."""
        self.ready()
        while not self.over or self.waiting:
            self.socket.poll(self.timeout_ms())
            while (received := sockets.receive(self.socket)) is not None:
                message, raw = codec.BROKER_TO_WORKER.decode(received.frames)
                self.message(message, raw)
            now_ns = time.monotonic_ns()
            if self.broker_epoch and now_ns >= self.beat_at_ns:
                self.beat(now_ns)
            self.flush()
            for job in list(self.jobs.values()):
                self.step(job)
            if self.draining is not None and not self.over:
                # A margin for the last messages, as a real worker keeps one for parking.
                late = time.monotonic_ns() > self.leave_at_ns - DRAIN_MARGIN_NS
                if late or not self.jobs:
                    self.leave(self.draining)

    def timeout_ms(self) -> int:
        if self.waiting:
            return 1
        now_ns = time.monotonic_ns()
        due = [self.beat_at_ns if self.broker_epoch else now_ns + SECOND_NS]
        due += [self.due_ns(job) for job in self.jobs.values()]
        if self.draining is not None:
            due.append(self.leave_at_ns - DRAIN_MARGIN_NS)
        return max(0, min(1_000, (min(due) - now_ns + 999_999) // 1_000_000))

    def due_ns(self, job: Job) -> int:
        """When the job's next piece is to be sent."""
        return job.started_ns + int(job.sent * SECOND_NS / self.rate) if self.rate else 0

    # --- commands -----------------------------------------------------------------------------

    def message(self, message: Any, raw: list[bytes]) -> None:
        match message:
            case WorkerWelcome():
                self.broker_epoch = message.broker_epoch
                self.heartbeat_ns = message.heartbeat_ms * 1_000_000
                self.jobs.clear()
                self.beat(time.monotonic_ns())
            case NoSession():
                self.ready()
            case Estimate():
                self.estimate(message)
            case Load():
                self.reply(
                    message,
                    Loaded,
                    weights_bytes=message.weights_bytes,
                    pool_bytes=message.pool_bytes,
                )
            case Run():
                self.start(message, raw)
            case CancelRun(run_op=run_op):
                if run_op in self.jobs:
                    self.jobs[run_op].stop = True
            case Forget(conversation=key):
                self.transcripts.pop(key, None)
                self.reply(message, WorkerOk)
            case Copy():
                self.reply(message, Copied, reason="state_missing")
            case Unload() | Budget():
                self.reply(message, WorkerOk)
            case Drain():
                self.draining = message
                self.leave_at_ns = time.monotonic_ns() + message.drain_ms * 1_000_000
            case _:
                pass

    def leave(self, command: Drain) -> None:
        """What still runs is stopped; then good-bye."""
        for job in list(self.jobs.values()):
            self.finish(job, "cancelled")
        self.reply(command, WorkerOk)
        self.say(WorkerBye(worker_epoch=self.epoch))
        self.over = True

    def ready(self) -> None:
        self.say(ready(self.device, self.epoch))

    def estimate(self, command: Estimate) -> None:
        if command.model.startswith("missing"):
            error = ErrorInfo(Code.NOT_FOUND, "no_such_model", f"there is no {command.model!r}")
            self.reply(command, Failed, error=error)
            return
        self.reply(command, Estimated, **sizes(command))

    # --- jobs ---------------------------------------------------------------------------------

    def start(self, run: Run, raw: list[bytes]) -> None:
        transcript = raw[0] if run.n_raw else self.transcripts.get(run.conversation, b"")
        if len(transcript) != 4 * run.transcript_tokens:
            error = ErrorInfo(Code.FAILED_PRECONDITION, "transcript_missing", "send it")
            self.reply(run, Failed, error=error, job=run.job)
            return
        keep = run.transcript_tokens if run.continue_ else 0
        prompt = run.tokens or [1] * max(1, len(run.prompt or "x"))
        packed = pack_tokens(prompt)
        self.reply(
            run,
            Started,
            [packed],
            job=run.job,
            keep=keep,
            n_raw=1,
            prompt_tokens=keep + len(prompt),
        )
        kept = transcript[: 4 * keep] + packed
        self.jobs[run.op] = Job(run, kept, run.max_tokens or 16, time.monotonic_ns())

    def step(self, job: Job) -> None:
        """Send what is due of a job, a bounded number of pieces."""
        for _ in range(PIECES_PER_TURN):
            if job.stop or job.sent >= job.pieces:
                self.finish(job, "cancelled" if job.stop else "length")
                return
            now_ns = time.monotonic_ns()
            if self.waiting or now_ns < self.due_ns(job):
                return
            job.sent += 1
            self.reply(job.run, RunTokens, job=job.run.job, text=str(now_ns), ids=[TOKEN])

    def finish(self, job: Job, stop_reason: Any) -> None:
        del self.jobs[job.run.op]
        generated = pack_tokens([TOKEN] * job.sent)
        if job.sent:
            self.transcripts[job.run.conversation] = job.transcript + generated
        usage = Usage(
            prompt_tokens=len(job.transcript) // 4,
            generated_tokens=job.sent,
            stop_reason=stop_reason,
        )
        self.reply(job.run, RunDone, job=job.run.job, usage=usage)

    # --- sending ------------------------------------------------------------------------------

    def reply(
        self, command: Command, kind: Any, raw: list[bytes] | None = None, **fields: Any
    ) -> None:
        self.say(
            kind(
                broker_epoch=command.broker_epoch,
                op=command.op,
                worker_epoch=self.epoch,
                **fields,
            ),
            raw,
        )

    def beat(self, now_ns: int) -> None:
        self.beat_at_ns = now_ns + self.heartbeat_ns
        self.seq += 1
        memory = Memory(used_bytes=0, own_bytes=0, foreign_bytes=0)
        self.say(
            Residency(
                broker_epoch=self.broker_epoch,
                worker_epoch=self.epoch,
                seq=self.seq,
                memory=memory,
            )
        )
        self.say(WorkerPing(n=self.seq, steps=self.seq, busy=bool(self.jobs)))

    def say(self, message: Any, raw: list[bytes] | None = None) -> None:
        self.waiting.append(codec.WORKER_TO_BROKER.encode(message, raw or ()))
        self.flush()

    def flush(self) -> None:
        while self.waiting and sockets.send(self.socket, self.waiting[0]) is SendResult.SENT:
            self.waiting.popleft()


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker that streams made-up tokens.")
    parser.add_argument("--workers", required=True, help="the broker's endpoint for workers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rate", type=float, default=0.0, help="pieces per second and job")
    parser.add_argument("--key", type=Path, help="key file, for a broker over tcp")
    given = parser.parse_args()
    context = zmq.Context()
    key = None if given.key is None else load_key(given.key)
    socket = sockets.connect(context, given.workers, key=key)
    worker = EchoWorker(socket, given.device, given.rate)
    try:
        worker.run()
    except KeyboardInterrupt:
        pass
    finally:
        worker.socket.close()
        context.term()


if __name__ == "__main__":
    main()
