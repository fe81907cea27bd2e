"""The worker process against a scripted broker, with the real engine on SmolLM2."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_broker import Attempt, WorkerBroker
from worker_process import WorkerProcess

from vram_conductor.protocol.commands import (
    CancelRun,
    Drain,
    Estimate,
    Estimated,
    Failed,
    Forget,
    Load,
    Loaded,
    Ready,
    Residency,
    Run,
    WorkerBye,
    WorkerOk,
    WorkerRefused,
)
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.values import AgentKey, ConversationKey, PoolShape, Sampling

pytestmark = pytest.mark.real

GIB = 1 << 30
N_CTX = 512
SHAPE = PoolShape(cells=512, slots=1, kv_type="f16")
AGENT = AgentKey("local", "coder")
MAIN = ConversationKey("local", "coder", "main")
GREEDY = Sampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repeat_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    penalty_last_n=0,
    seed=1,
)
PROMPT = "Once upon a time there was a small computer that wanted to learn how to"


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[WorkerBroker]:
    with WorkerBroker(f"ipc://{short_tmp}/w.ipc", heartbeat_ms=1_000) as made:
        yield made


class Talk:
    """The broker's part of one conversation: its transcript and version."""

    def __init__(self, broker: WorkerBroker) -> None:
        self.broker = broker
        self.ids: list[int] = []
        self.version = 0
        self._job = 0

    def say(self, *, max_tokens: int = 4, raw: bool = True, **fields: Any) -> Attempt:
        op = self.start(max_tokens=max_tokens, raw=raw, **fields)
        attempt = self.broker.follow(op)
        self.take(attempt)
        return attempt

    def start(self, *, max_tokens: int, raw: bool = True, **fields: Any) -> int:
        self._job += 1
        buffers = [np.array(self.ids, dtype="<i4").tobytes()] if raw and self.ids else []
        return self.broker.command(
            Run,
            buffers,
            job=self._job,
            conversation=MAIN,
            version=self.version,
            transcript_tokens=len(self.ids),
            n_raw=len(buffers),
            max_tokens=max_tokens,
            sampling=GREEDY,
            **fields,
        )

    def take(self, attempt: Attempt) -> None:
        if attempt.done is None or attempt.started is None or not attempt.ids:
            return
        fresh = np.frombuffer(attempt.prompt, dtype="<i4").tolist()
        self.ids = [*self.ids[: attempt.started.keep], *fresh, *attempt.ids]
        self.version = attempt.done.usage.state_version


def load(broker: WorkerBroker, model: str = "smollm2-135m") -> tuple[Estimated, Loaded]:
    op = broker.command(Estimate, model=model, shape=SHAPE, n_ctx=N_CTX, cap_bytes=GIB)
    estimated = broker.answer(op, Estimated)
    op = broker.command(
        Load,
        agent=AGENT,
        model=estimated.model.model,
        path=estimated.model.path,
        shape=SHAPE,
        n_ctx=N_CTX,
        state_bytes=estimated.state_bytes,
        weights_bytes=estimated.weights_bytes,
        pool_bytes=estimated.pool_bytes,
        budget_bytes=GIB,
    )
    return estimated, broker.answer(op, Loaded)


def test_park_kill_adopt_and_go_on(broker: WorkerBroker, short_tmp: Path, smollm2: Path) -> None:
    endpoint = f"ipc://{short_tmp}/w.ipc"
    with WorkerProcess(short_tmp, endpoint) as worker:
        ready = broker.ready()
        assert (ready.device.device, ready.device.kind) == ("cpu", "cpu")
        assert ready.device.total_bytes > 0
        assert ready.pid == worker.process.pid
        assert ready.parked == []
        assert ready.host_total_bytes > 0
        estimated, loaded = load(broker)
        assert estimated.model.path == str(smollm2)
        assert estimated.state_bytes > 0
        assert loaded.weights_bytes is not None
        assert loaded.pool_bytes is not None
        talk = Talk(broker)
        first = talk.say(prompt=PROMPT, max_tokens=6)
        assert first.done is not None, first.failed
        assert len(first.ids) == 6
        assert first.text
        assert len(worker.files()) == 1, "a checkpoint after every job"
        report, _ = broker.expect(
            Residency, lambda found: any(place.parked_bytes for place in found.places)
        )
        keys = {line.key.split(":")[0] for line in report.lines}
        assert {"weights", "pool"} <= keys
        assert report.memory.own_bytes == sum(line.bytes for line in report.lines)
        assert report.host_lines[0].bytes == worker.files()[0].stat().st_blocks * 512
        wait_for_seal(worker)
        worker.kill()
    with WorkerProcess(short_tmp, endpoint):
        again = broker.ready([MAIN])
        assert again.worker_epoch > ready.worker_epoch
        assert [(state.conversation, state.model) for state in again.parked] == [
            (MAIN, estimated.model.model)
        ]
        parked = again.parked[0].n_tokens
        assert parked == len(talk.ids) - 1, "the last token has no KV yet"
        load(broker)
        second = talk.say(prompt=" dream of", continue_=True)
        assert second.done is not None, second.failed
        usage = second.done.usage
        assert usage.reused_tokens == parked
        assert usage.swap.restored
        assert usage.reprefilled_tokens == 0
    # The same again in a life that was never interrupted: greedy tokens are equal.
    with WorkerProcess(short_tmp / "other", endpoint):
        broker.ready()
        load(broker)
        reference = Talk(broker)
        assert reference.say(prompt=PROMPT, max_tokens=6).ids == first.ids
        assert reference.say(prompt=" dream of", continue_=True).ids == second.ids


def wait_for_seal(worker: WorkerProcess) -> None:
    """Until the checkpoint has its checksum (word 8 or 10 of the header, see arena_format)."""
    deadline = time.monotonic() + 20
    while True:
        words = np.fromfile(worker.files()[0], dtype=np.uint64, count=12)
        if int(words[4]) >> 1 in (int(words[8]), int(words[10])):
            return
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_damaged_state_is_refilled_and_said(broker: WorkerBroker, short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/w.ipc"
    with WorkerProcess(short_tmp, endpoint) as worker:
        broker.ready()
        load(broker)
        talk = Talk(broker)
        talk.say(prompt=PROMPT)
        wait_for_seal(worker)
        worker.kill()
        with worker.files()[0].open("r+b") as file:
            file.seek(3 * 4096 + 1000)
            byte = file.read(1)[0]
            file.seek(3 * 4096 + 1000)
            file.write(bytes([byte ^ 0xFF]))
    with WorkerProcess(short_tmp, endpoint):
        assert len(broker.ready([MAIN]).parked) == 1
        load(broker)
        attempt = talk.say(prompt=" dream", continue_=True)
        assert attempt.done is not None, attempt.failed
        usage = attempt.done.usage
        assert usage.reused_tokens == 0
        assert usage.reprefilled_tokens > 10
        assert "corrupt" in usage.reprefill_reason


def test_orphans_go_and_the_rest_stays(broker: WorkerBroker, short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/w.ipc"
    with WorkerProcess(short_tmp, endpoint) as worker:
        broker.ready()
        load(broker)
        talk = Talk(broker)
        talk.say(prompt=PROMPT)
        assert len(worker.files()) == 1
        op = broker.command(Forget, conversation=MAIN)
        broker.answer(op, WorkerOk)
        assert worker.files() == []
        talk = Talk(broker)
        talk.say(prompt=PROMPT)
        wait_for_seal(worker)
        worker.kill()
    with WorkerProcess(short_tmp, endpoint) as worker:
        assert len(broker.ready([]).parked) == 1
        broker.until(lambda: worker.files() == [], "the orphan is deleted")


def test_sigterm_parks_says_bye_and_exits(broker: WorkerBroker, short_tmp: Path) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc") as worker:
        broker.ready()
        load(broker)
        talk = Talk(broker)
        talk.say(prompt=PROMPT)
        op = talk.start(prompt="Tell me a long story about", max_tokens=400)
        broker.until(
            lambda: any(getattr(message, "op", 0) == op for _, message, _ in broker.received),
            "the job runs",
        )
        worker.process.send_signal(signal.SIGTERM)
        attempt = broker.follow(op)
        assert attempt.failed is None or attempt.failed.error.retryable
        broker.expect(WorkerBye)
        assert worker.process.wait(20) == 0, worker.log
        assert len(worker.files()) == 1


def test_drain_by_the_broker(broker: WorkerBroker, short_tmp: Path) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc") as worker:
        broker.ready()
        op = broker.command(Drain, drain_ms=1_000)
        broker.answer(op, WorkerOk)
        broker.expect(WorkerBye)
        assert worker.process.wait(20) == 0, worker.log


def test_the_end_of_the_supervisor_is_the_end(broker: WorkerBroker, short_tmp: Path) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc") as worker:
        broker.ready()
        os.close(worker.life_w)
        worker.life_w = -1
        broker.expect(WorkerBye)
        assert worker.process.wait(20) == 0, worker.log


def test_a_new_broker_epoch_ends_what_runs(broker: WorkerBroker, short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/w.ipc"
    with WorkerProcess(short_tmp, endpoint):
        broker.ready()
        load(broker)
        op = Talk(broker).start(prompt="Tell me a long story about", max_tokens=400)
        broker.until(
            lambda: any(getattr(message, "op", 0) == op for _, message, _ in broker.received),
            "the job runs",
        )
        broker.close()
        with WorkerBroker(endpoint, epoch=2, heartbeat_ms=1_000) as second:
            second.ready()
            second._op = op + 100
            load(second)
            attempt = Talk(second).say(prompt=PROMPT)
            assert attempt.done is not None, attempt.failed
            old = [message for _, message, _ in second.received if getattr(message, "op", 0) == op]
            assert old == [], "nothing of the former life"


def test_cancel_stops_a_run(broker: WorkerBroker, short_tmp: Path) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc"):
        broker.ready()
        load(broker)
        talk = Talk(broker)
        op = talk.start(prompt="Tell me a long story about", max_tokens=400)
        broker.until(
            lambda: any(getattr(message, "op", 0) == op for _, message, _ in broker.received),
            "the job runs",
        )
        broker.command(CancelRun, run_op=op)
        attempt = broker.follow(op)
        assert attempt.done is not None
        assert attempt.done.usage.stop_reason == "cancelled"
        assert attempt.done.usage.generated_tokens < 400


def test_estimates_are_refused_with_reasons(
    broker: WorkerBroker, short_tmp: Path, smollm2: Path
) -> None:
    outside = short_tmp / "outside.gguf"
    outside.write_bytes(b"GGUF but not really")
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc"):
        broker.ready()

        def refuse(model: str, **fields: Any) -> ErrorInfo:
            fields = {"cap_bytes": GIB, **fields}
            op = broker.command(Estimate, model=model, shape=SHAPE, n_ctx=N_CTX, **fields)
            return broker.answer(op, Failed).error

        unknown = refuse("smolm2")
        assert (unknown.code, unknown.reason) == (Code.NOT_FOUND, "no_such_model")
        assert "conductor models pull smollm2-" in unknown.message
        assert "smollm2-135m" in unknown.message
        assert refuse(str(outside)).reason == "path_not_allowed"
        assert refuse(str(outside), bare_path=True).reason == "bad_model"
        took: list[float] = []
        while len(took) < 20 and min(took, default=1.0) >= 1:
            begin = time.monotonic()
            large = refuse("smollm2-135m", cap_bytes=1_000_000)
            took.append(time.monotonic() - begin)
        assert min(took) < 1, "its size alone says it"
        assert (large.code, large.reason) == (Code.OUT_OF_RANGE, "file_exceeds_cap")
        assert large.details == {
            "file_bytes": smollm2.stat().st_size,
            "cap_bytes": 1_000_000,
        }
        load(broker)  # it still works


def test_a_refused_worker_leaves(broker: WorkerBroker, short_tmp: Path) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc") as worker:
        broker.expect(Ready)
        broker.send(WorkerRefused(error=ErrorInfo(Code.ALREADY_EXISTS, "device_taken", "taken")))
        assert worker.process.wait(20) == 69
        assert "device_taken" in worker.log


def test_two_workers_on_one_device_and_arena_folder(broker: WorkerBroker, short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/w.ipc"
    with WorkerProcess(short_tmp, endpoint) as first:
        broker.ready()
        with WorkerProcess(short_tmp, endpoint) as second:
            # Supervised, and its holder lives: another try cannot help.
            assert second.process.wait(40) == 69, second.log
            assert "arena_in_use" in second.log
            assert str(first.process.pid) in second.log


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (["--sample-ms", "0"], 64, "sample_ms"),
        (["--workers", "tcp://nowhere"], 64, "bad_endpoint"),
        (["--catalogue", "/none.toml"], 64, "bad_catalogue"),
        (["--config", "/none.toml"], 64, "bad_config"),
        (["--no-such-flag"], 64, "no-such-flag"),
        (["--device", "tpu:0"], 64, "no_such_device"),
        (["--supervised-fd", "999"], 64, "not open"),
        (["--arena-dir", "/proc/none"], 69, "arena_dir"),
    ],
)
def test_what_keeps_it_from_starting(
    short_tmp: Path, flags: list[str], code: int, word: str
) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/w.ipc", *flags) as worker:
        assert worker.process.wait(30) == code, worker.log
        assert word in worker.log
