"""The worker's session and its backlog, purely."""

from __future__ import annotations

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import (
    Budget,
    Loaded,
    NoSession,
    Ready,
    Residency,
    RunDone,
    RunTokens,
    Started,
    WorkerBye,
    WorkerPing,
    WorkerPong,
    WorkerRefused,
    WorkerWelcome,
)
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.values import DeviceInfo, Memory, Usage
from vram_conductor.worker.backlog import JOIN_CHARS_MAX, Backlog
from vram_conductor.worker.session import READY_AGAIN_MS, Session, Verdict

MS = 1_000_000
MEMORY = Memory(used_bytes=0, own_bytes=0, foreign_bytes=0)


def welcome(epoch: int) -> WorkerWelcome:
    return WorkerWelcome(v=(1, 0), broker_epoch=epoch, heartbeat_ms=100)


def ready() -> Ready:
    return Ready(
        v=(1, 0),
        worker="w",
        worker_epoch=1,
        pid=1,
        host="h",
        version="0",
        build="b",
        device=DeviceInfo(device="cpu", kind="cpu", name="x", total_bytes=1),
        memory=MEMORY,
    )


def tokens(op: int, text: str, ids: list[int] | None = None, epoch: int = 5) -> RunTokens:
    return RunTokens(broker_epoch=epoch, op=op, worker_epoch=1, job=op, text=text, ids=ids or [])


def done(op: int, epoch: int = 5) -> RunDone:
    return RunDone(broker_epoch=epoch, op=op, worker_epoch=1, job=op, usage=Usage())


def residency(seq: int, epoch: int = 5) -> Residency:
    return Residency(broker_epoch=epoch, worker_epoch=1, seq=seq, memory=MEMORY)


def opened(epoch: int = 5) -> Session:
    session = Session(0)
    session.said_ready(ready(), 0)
    assert session.receive(welcome(epoch), 0) is Verdict.OPENED
    return session


def test_ready_is_said_and_repeated_until_welcomed() -> None:
    session = Session(0)
    assert session.ready_due(0)
    session.said_ready(ready(), 0)
    assert not session.ready_due(READY_AGAIN_MS * MS - 1)
    assert session.ready_due(READY_AGAIN_MS * MS)
    assert not session.is_open
    session.receive(welcome(5), 1)
    assert session.is_open
    assert not session.ready_due(1 << 60)


def test_commands_of_another_epoch_are_dropped() -> None:
    session = opened(5)
    assert session.receive(Budget(broker_epoch=5, op=1, budget_bytes=1), 0) is Verdict.HAND
    assert session.receive(Budget(broker_epoch=4, op=1, budget_bytes=1), 0) is Verdict.DROP
    assert session.receive(welcome(6), 0) is Verdict.OPENED
    assert session.receive(Budget(broker_epoch=5, op=1, budget_bytes=1), 0) is Verdict.DROP
    assert session.receive(Budget(broker_epoch=6, op=1, budget_bytes=1), 0) is Verdict.HAND


def test_commands_before_the_welcome_are_dropped() -> None:
    session = Session(0)
    session.said_ready(ready(), 0)
    assert session.receive(Budget(broker_epoch=5, op=1, budget_bytes=1), 0) is Verdict.DROP


def test_replies_of_another_epoch_do_not_leave() -> None:
    session = opened(5)
    assert session.may_send(tokens(1, "x"))
    assert not session.may_send(tokens(1, "x", epoch=4))
    assert session.may_send(residency(1))
    assert not session.may_send(residency(1, epoch=4))
    session.lose()
    assert not session.may_send(tokens(1, "x"))
    assert not session.may_send(WorkerPing(n=1, steps=1))
    assert session.may_send(ready())
    assert session.may_send(WorkerBye(worker_epoch=7))


def test_no_session_asks_for_ready_once() -> None:
    session = opened()
    assert session.receive(NoSession(), 0) is Verdict.LOST
    assert not session.is_open
    assert session.ready_due(0)
    session.said_ready(ready(), 0)
    assert session.receive(NoSession(), 1) is Verdict.DROP, "an answer to an older ping"
    assert session.receive(welcome(5), 2) is Verdict.OPENED


def test_refused_and_pong() -> None:
    session = opened()
    error = ErrorInfo(Code.ALREADY_EXISTS, "device_taken", "no")
    assert session.receive(WorkerRefused(error=error), 0) is Verdict.REFUSED
    assert session.receive(WorkerPong(n=1), 0) is Verdict.DROP


def test_silence_is_death_after_three_heartbeats_and_pings_ask_before() -> None:
    session = opened()
    assert not session.ping_due(99 * MS)
    assert session.ping_due(100 * MS)
    assert not session.dead(200 * MS)
    assert not session.dead(299 * MS)
    assert session.dead(301 * MS)
    assert session.lose()
    assert not session.lose(), "only once"
    assert not session.dead(400 * MS)
    assert not session.ping_due(900 * MS)


def test_any_traffic_counts_as_life() -> None:
    session = opened()
    for now in range(50, 2000, 50):
        session.receive(WorkerPong(), now * MS)
        assert not session.dead(now * MS)


def test_the_next_deadline_is_in_the_future() -> None:
    assert Session(0).next_ns(7) > 7
    assert 0 < opened().next_ns(0) <= limits.HEARTBEAT_MS * MS


def drain(backlog: Backlog) -> list[msgspec.Struct]:
    found: list[msgspec.Struct] = []
    while (entry := backlog.first()) is not None:
        assert entry.message is not None
        found.append(entry.message)
        backlog.drop_first()
    return found


def test_waiting_tokens_of_an_attempt_are_joined() -> None:
    backlog = Backlog()
    backlog.push(tokens(1, "a", [1]), [])
    backlog.push(tokens(2, "x", [7]), [])
    backlog.push(tokens(1, "b", [2, 3]), [])
    backlog.push(tokens(2, "y", [8]), [])
    backlog.push(done(1), [])
    assert drain(backlog) == [tokens(1, "ab", [1, 2, 3]), tokens(2, "xy", [7, 8]), done(1)]
    assert len(backlog) == 0


def test_tokens_never_pass_another_message_of_their_attempt() -> None:
    backlog = Backlog()
    started = Started(broker_epoch=5, op=1, worker_epoch=1, job=1, keep=0)
    backlog.push(started, [b"ids"])
    backlog.push(tokens(1, "a"), [])
    backlog.push(done(1), [])
    backlog.push(tokens(1, "of the next life"), [])
    entry = backlog.first()
    assert entry is not None
    assert entry.raw == [b"ids"]
    assert drain(backlog) == [started, tokens(1, "a"), done(1), tokens(1, "of the next life")]


def test_what_was_sent_is_not_joined_any_more() -> None:
    backlog = Backlog()
    backlog.push(tokens(1, "a"), [])
    assert drain(backlog) == [tokens(1, "a")]
    backlog.push(tokens(1, "b"), [])
    assert drain(backlog) == [tokens(1, "b")]


def test_joined_messages_stay_small() -> None:
    backlog = Backlog()
    piece = "x" * (JOIN_CHARS_MAX // 2)
    for _ in range(5):
        backlog.push(tokens(1, piece), [])
    texts = [message.text for message in drain(backlog) if isinstance(message, RunTokens)]
    assert len(texts) == 3
    assert "".join(texts) == piece * 5


def test_only_the_newest_report_waits() -> None:
    backlog = Backlog()
    loaded = Loaded(broker_epoch=5, op=3, worker_epoch=1)
    for seq in range(3):
        backlog.push(residency(seq), [])
    backlog.push(loaded, [])
    backlog.push(residency(3), [])
    assert drain(backlog) == [loaded, residency(3)]
    backlog.push(residency(4), [])
    backlog.push(residency(5), [])
    assert drain(backlog) == [residency(5)]


def test_a_slow_link_costs_memory_by_the_job_not_by_the_token() -> None:
    backlog = Backlog()
    for index in range(10_000):
        backlog.push(tokens(index % 4, "x", [index]), [])
        backlog.push(residency(index), [])
    assert len(drain(backlog)) < 10
    backlog.push(tokens(1, "x"), [])
    backlog.clear()
    assert backlog.first() is None
