"""The IO thread against a scripted broker on a real socket."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from worker_broker import WorkerBroker

from vram_conductor.protocol.codec import BROKER_TO_WORKER
from vram_conductor.protocol.commands import (
    Budget,
    Drain,
    NoSession,
    Ready,
    RunDone,
    RunTokens,
    WorkerBye,
    WorkerPong,
    WorkerRefused,
)
from vram_conductor.protocol.errors import Code, ErrorInfo, InvalidArgument
from vram_conductor.protocol.sockets import HWM, RECONNECT_MS
from vram_conductor.protocol.values import DeviceInfo, Memory, Usage
from vram_conductor.worker.inbound import Arrived, Inbound, ReadyWanted, Refused, SessionLost
from vram_conductor.worker.link import Link

PATIENCE_S = 20.0


def ready() -> Ready:
    return Ready(
        v=(1, 0),
        worker="w",
        worker_epoch=7,
        pid=1,
        host="h",
        version="0",
        build="b",
        device=DeviceInfo(device="cpu", kind="cpu", name="x", total_bytes=1),
        memory=Memory(used_bytes=0, own_bytes=0, foreign_bytes=0),
    )


def tokens(op: int, text: str, epoch: int = 1) -> RunTokens:
    return RunTokens(broker_epoch=epoch, op=op, worker_epoch=7, job=1, text=text)


def done(op: int, epoch: int = 1) -> RunDone:
    return RunDone(broker_epoch=epoch, op=op, worker_epoch=7, job=1, usage=Usage())


class Engine:
    """Stands in for the engine thread: answers ReadyWanted at once, keeps the rest."""

    def __init__(self, endpoint: str) -> None:
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.readies = 0
        self.link = Link(endpoint, self._deliver, lambda: (3, True))
        self.link.start()

    def _deliver(self, item: Inbound) -> None:
        if isinstance(item, ReadyWanted):
            self.readies += 1
            self.link.send((ready(), []))
        else:
            self.inbox.put(item)

    def take(self, kind: type[Inbound], patience_s: float = PATIENCE_S) -> Inbound:
        item = self.inbox.get(timeout=patience_s)
        assert isinstance(item, kind), item
        return item


@pytest.fixture
def endpoint(short_tmp: Path) -> str:
    return f"ipc://{short_tmp}/w.ipc"


@pytest.fixture
def engine(endpoint: str) -> Iterator[Engine]:
    stand_in = Engine(endpoint)
    yield stand_in
    stand_in.link.close()


@pytest.fixture
def brokers(endpoint: str) -> Iterator[Callable[..., WorkerBroker]]:
    made: list[WorkerBroker] = []

    def make(epoch: int = 1, heartbeat_ms: int = 500) -> WorkerBroker:
        made.append(WorkerBroker(endpoint, epoch=epoch, heartbeat_ms=heartbeat_ms))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


Brokers = Callable[..., WorkerBroker]


def test_ready_welcome_commands_and_replies(engine: Engine, brokers: Brokers) -> None:
    broker = brokers()
    assert broker.ready().worker_epoch == 7
    engine.take(Arrived)  # W_WELCOME goes to the engine too.
    broker.command(Budget, budget_bytes=5)
    arrived = engine.take(Arrived)
    assert isinstance(arrived, Arrived)
    assert isinstance(arrived.message, Budget)
    engine.link.send((tokens(1, "a"), []), (tokens(1, "b"), []), (done(1), []))
    text = ""
    while True:
        broker.pump()
        for _, message, _ in broker.received:
            if isinstance(message, RunTokens):
                text += message.text
        if any(isinstance(message, RunDone) for _, message, _ in broker.received):
            break
        text = ""
    assert text == "ab"


def test_the_broker_may_come_later_than_the_worker(engine: Engine, brokers: Brokers) -> None:
    assert engine.inbox.empty()
    assert brokers().ready() == ready()


def test_who_hangs_up_at_once_is_not_asked_all_the_time() -> None:
    """So does a tunnel or a proxy whose other end is away."""
    calls = 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = Engine(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        until_s = time.monotonic() + 1.0
        while (left_s := until_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            with suppress(TimeoutError):
                server.accept()[0].close()
                calls += 1
        engine.link.close()
    assert 2 <= calls <= 2_000 // RECONNECT_MS


def test_pings_carry_the_work_loops_state(engine: Engine, brokers: Brokers) -> None:
    broker = brokers(heartbeat_ms=30)
    broker.ready()
    broker.until(lambda: len(broker.pings) >= 3, "three pings")
    assert all((ping.steps, ping.busy) == (3, True) for ping in broker.pings)
    assert [ping.n for ping in broker.pings] == list(range(1, len(broker.pings) + 1))


def test_a_restarted_broker_gets_ready_at_once_and_no_old_output(
    engine: Engine, brokers: Brokers
) -> None:
    first = brokers(epoch=1, heartbeat_ms=60_000)
    first.ready()
    engine.take(Arrived)
    first.close()
    engine.take(SessionLost)
    engine.link.send((tokens(1, "into the void"), []))
    second = brokers(epoch=2, heartbeat_ms=60_000)
    begin = time.monotonic()
    second.ready()
    assert time.monotonic() - begin < 30, "not only at the next heartbeat"
    engine.take(Arrived)
    engine.link.send((tokens(1, "of the old life", epoch=1), []), (done(9, epoch=2), []))
    second.answer(9, RunDone)
    assert not any(isinstance(message, RunTokens) for _, message, _ in second.received)
    assert engine.readies == 2


@pytest.mark.parametrize("leaves", [False, True])
def test_a_broker_that_goes_is_a_warning_only_for_whoever_stays(
    engine: Engine, brokers: Brokers, caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    caplog.set_level("INFO", logger="vram_conductor")
    broker = brokers(heartbeat_ms=60_000)
    broker.ready()
    engine.take(Arrived)
    if leaves:
        broker.send(Drain(broker_epoch=1, op=1, drain_ms=0))
        engine.take(Arrived)
    broker.close()
    engine.take(SessionLost)
    last = caplog.records[-1]
    if leaves:
        said = "the broker is gone: disconnected; this worker is leaving anyway"
        assert (last.levelname, last.getMessage()) == ("INFO", said)
    else:
        assert (last.levelname, last.getMessage()) == ("WARNING", "session lost: disconnected")


def test_commands_of_another_epoch_do_not_reach_the_engine(
    engine: Engine, brokers: Brokers
) -> None:
    broker = brokers(epoch=4)
    broker.ready()
    engine.take(Arrived)
    broker.send(Budget(broker_epoch=3, op=1, budget_bytes=1))
    broker.send(Budget(broker_epoch=4, op=2, budget_bytes=2))
    arrived = engine.take(Arrived)
    assert isinstance(arrived, Arrived)
    assert isinstance(arrived.message, Budget)
    assert arrived.message.op == 2


def test_a_silent_broker_is_given_up_and_a_new_session_opened(
    engine: Engine, brokers: Brokers
) -> None:
    broker = brokers(heartbeat_ms=30)
    broker.mute = True
    broker.ready()
    engine.take(Arrived)
    engine.take(SessionLost)
    first = broker.peer
    broker.mute = False
    broker.ready()
    assert broker.peer != first, "over a new connection"
    engine.take(Arrived)


def test_a_connection_that_stands_at_once_is_noticed(
    endpoint: str, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = zmq.Socket[bytes].get_monitor_socket

    def late(socket: zmq.Socket[bytes], *arguments: Any) -> zmq.Socket[bytes]:
        time.sleep(0.3)  # As long as libzmq's thread may take to connect meanwhile.
        return attach(socket, *arguments)

    broker = brokers()
    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", late)
    engine = Engine(endpoint)
    try:
        broker.expect(Ready, patience_s=10)
    finally:
        engine.link.close()


def test_no_session_makes_it_say_ready(engine: Engine, brokers: Brokers) -> None:
    broker = brokers(heartbeat_ms=5_000)
    broker.ready()
    engine.take(Arrived)
    broker.send(NoSession())
    engine.take(SessionLost)
    broker.ready()
    engine.take(Arrived)


def test_a_refusal_reaches_the_engine(engine: Engine, brokers: Brokers) -> None:
    broker = brokers()
    broker.expect(Ready)
    broker.send(WorkerRefused(error=ErrorInfo(Code.ALREADY_EXISTS, "device_taken", "no")))
    item = engine.take(Refused)
    assert isinstance(item, Refused)
    assert item.error.reason == "device_taken"


def test_a_broker_of_another_protocol_is_no_broker_to_wait_for(
    engine: Engine, brokers: Brokers
) -> None:
    broker = brokers()
    broker.expect(Ready)
    mine, body = BROKER_TO_WORKER.encode(WorkerPong())
    newer = mine[:3] + bytes([mine[3] + 1])
    broker._listener.socket.send_multipart([broker.peer, newer, body])
    item = engine.take(Refused)
    assert isinstance(item, Refused)
    assert item.error.reason == "unsupported_version"
    assert (item.error.details["theirs"], item.error.details["ours"]) == (mine[3] + 1, mine[3])


def test_nonsense_is_survived(engine: Engine, brokers: Brokers) -> None:
    broker = brokers()
    broker.ready()
    engine.take(Arrived)
    socket = broker._listener.socket
    for frames in ([b"x"], [b"VMC\x01", b"\xc1"], [b"VMC\x01", b"\x91" * 100_000], [b"a"] * 50):
        socket.send_multipart([broker.peer, *frames])
    broker.command(Budget, budget_bytes=5)
    engine.take(Arrived)


def test_a_broker_that_does_not_read_blocks_nobody_and_loses_nothing(
    engine: Engine, brokers: Brokers
) -> None:
    broker = brokers(heartbeat_ms=60_000)
    broker.ready()
    engine.take(Arrived)
    count = 60_000
    begin = time.monotonic()
    for index in range(count):
        engine.link.send((tokens(1 + index % 2, f"{index},"), []))
    engine.link.send((done(1), []), (done(2), []))
    assert time.monotonic() - begin < 10, "sending never waits"
    messages = 0
    ends = {1: 0, 2: 0}
    texts = {1: "", 2: ""}
    deadline = time.monotonic() + PATIENCE_S
    while not all(ends.values()):
        assert time.monotonic() < deadline
        broker.pump()
        messages += len(broker.received)
        for _, message, _ in broker.received:
            if isinstance(message, RunTokens):
                assert not ends[message.op]
                texts[message.op] += message.text
            elif isinstance(message, RunDone):
                ends[message.op] += 1
        broker.received.clear()
    assert ends == {1: 1, 2: 1}
    assert messages < count, "what waited was joined"
    for op in (1, 2):
        assert texts[op] == "".join(f"{index}," for index in range(op - 1, count, 2))


def test_a_full_socket_keeps_what_can_not_be_joined(engine: Engine, brokers: Brokers) -> None:
    broker = brokers(heartbeat_ms=60_000)
    broker.ready()
    engine.take(Arrived)
    count = 3 * HWM  # More than both ends of the socket hold.
    for op in range(count):
        engine.link.send((done(op), []))
    deadline = time.monotonic() + PATIENCE_S
    while not engine.link._was_full:
        assert time.monotonic() < deadline, "the socket never was full"
        time.sleep(0.002)
    got: list[int] = []
    while len(got) < count:
        assert time.monotonic() < deadline, len(got)
        broker.pump()
        got += [message.op for _, message, _ in broker.received if isinstance(message, RunDone)]
        broker.received.clear()
    assert got == list(range(count))


def test_bye_is_still_sent_when_closing(engine: Engine, brokers: Brokers) -> None:
    broker = brokers()
    broker.ready()
    engine.take(Arrived)
    engine.link.send((WorkerBye(worker_epoch=7), []))
    engine.link.close()
    broker.expect(WorkerBye)


def test_bye_is_said_though_the_welcome_is_still_under_way(
    engine: Engine, brokers: Brokers
) -> None:
    broker = brokers()
    broker.expect(Ready)
    engine.link.send((WorkerBye(worker_epoch=7), []))
    broker.expect(WorkerBye)


def test_a_bad_endpoint_is_said_at_once() -> None:
    with pytest.raises(InvalidArgument):
        Link("tcp://nowhere", lambda item: None, lambda: (0, False))


HANG = """
import sys, time
from vram_conductor.worker import logs
from vram_conductor.worker.link import Link
logs.set_up()
link = Link(sys.argv[1], lambda item: None, lambda: (0, True), hang_ms=300)
link.start()
time.sleep(60)
"""


def test_a_token_does_not_ask_the_watchdog(endpoint: str) -> None:
    """It is asked by the clock: that costs more than sending a token."""
    asked: list[float] = []

    def progress() -> tuple[int, bool]:
        asked.append(time.monotonic())
        return 0, False

    link = Link(endpoint, lambda item: None, progress, hang_ms=60_000)
    link.start()
    begin = time.monotonic()
    for op in range(300):
        link.send((tokens(op, "x"), []))
        while link._outgoing:
            assert time.monotonic() < begin + PATIENCE_S
    link.close()
    assert len(asked) <= 2 + 4 * (time.monotonic() - begin)


def test_a_hanging_engine_ends_the_process(endpoint: str) -> None:
    done_ = subprocess.run(
        [sys.executable, "-c", HANG, endpoint], capture_output=True, timeout=30, check=False
    )
    assert done_.returncode == 75
    assert b"no step for" in done_.stderr
    assert b"most recent call first" in done_.stderr, "it says where every thread is"


STUCK = """
import ctypes, itertools, sys, time
from vram_conductor.worker.link import Link
steps = itertools.count()
link = Link(sys.argv[1], lambda item: None, lambda: (next(steps), True), hang_ms=300)
link.start()
time.sleep(0.5)
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # Waits for itself, with the interpreter's lock: the IO thread cannot run.
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_hang_that_holds_the_interpreter_ends_the_process_too(endpoint: str) -> None:
    begin = time.monotonic()
    done_ = subprocess.run(
        [sys.executable, "-c", STUCK, endpoint], capture_output=True, timeout=50, check=False
    )
    assert done_.returncode == -signal.SIGALRM
    assert b"most recent call first" in done_.stderr, "it says where every thread is"
    assert time.monotonic() - begin < 40


STOPPED = """
import sys, time
from vram_conductor.worker import logs
from vram_conductor.worker.link import Link
logs.set_up()
asked = 0
def progress():
    global asked
    asked += 1
    return asked // 2, True  # A step takes a while: none while the process is stopped.
link = Link(sys.argv[1], lambda item: None, progress, hang_ms=1000)
link.start()
for line in sys.stdin:
    print(asked, flush=True)
"""


def test_a_process_that_was_stopped_for_long_goes_on(endpoint: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            return int(process.stdout.readline() or -1)

        for _ in range(2):
            while ask() < 3:
                pass
            process.send_signal(signal.SIGSTOP)
            time.sleep(2.5)  # Longer than the kernel's timer; nothing can be polled for.
            process.send_signal(signal.SIGCONT)
            before = ask()
            assert before >= 0
            deadline = time.monotonic() + 20
            while (now := ask()) < before + 8:
                assert now >= 0, "it has ended"
                assert time.monotonic() < deadline
        process.stdin.close()
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "nothing here ran for" in process.stderr.read()
