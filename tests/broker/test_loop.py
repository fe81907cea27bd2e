"""The loop on real sockets, around a scripted core: frames, fairness, slow and vanished peers."""

from __future__ import annotations

import errno
import itertools
import os
import socket as plain_socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from vram_conductor.broker.effects import Append, Effect, Exit, Log, SendClient, SendWorker
from vram_conductor.broker.events import (
    ClientBad,
    ClientFlow,
    ClientGone,
    ClientMessageIn,
    Event,
    JournalTrouble,
    Shutdown,
    Tick,
    WorkerBad,
    WorkerGone,
    WorkerMessageIn,
)
from vram_conductor.broker.journal import files as journal_file
from vram_conductor.broker.journal import journal as journal_module
from vram_conductor.broker.journal.journal import Journal
from vram_conductor.broker.journal.opening import open_journal
from vram_conductor.broker.journal.records import BrokerEpoch
from vram_conductor.broker.shell.auth import identify
from vram_conductor.broker.shell.large_sends import IN_FLIGHT_BYTES_MAX, LARGE_BYTES
from vram_conductor.broker.shell.loop import MESSAGES_PER_TURN, Loop
from vram_conductor.broker.shell.outbox import PEER_BYTES_MAX, Outbox
from vram_conductor.broker.shell.peer_watch import EVENTS
from vram_conductor.broker.shell.port import BAD_PER_SECOND_MAX, FLUSH_NS, SECOND_NS, Port
from vram_conductor.broker.shell.stop import Stop
from vram_conductor.protocol import codec, limits, sockets
from vram_conductor.protocol.commands import (
    FromWorker,
    Run,
    Started,
    WorkerBye,
    WorkerPing,
    WorkerPong,
)
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.messages import (
    BrokerMessage,
    Cancel,
    ClientMessage,
    Error,
    List,
    Ok,
    Ping,
    Pong,
    Status,
    Tokens,
)
from vram_conductor.protocol.sockets import Socket
from vram_conductor.protocol.values import ConversationKey

WAIT_S = 20.0
WAIT_MS = 20_000
MIB = 1 << 20
RID = b"0123456789abcdef"


RUN = Run(
    broker_epoch=1,
    op=2,
    job=3,
    conversation=ConversationKey("local", "a", "main"),
    version=0,
    transcript_tokens=1,
    n_raw=1,
    tokens=[5],
)


class ScriptedCore:
    """PING → PONG (and one to ``send_to``); STARTED → RUN with the same buffer; LIST → OK after a
    journal record; STATUS → ``burst`` TOKENS; CANCEL → a Tick is due. Remembers every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.burst = 0
        self.send_to = b""
        self.piece = "x"
        self.deadline_ns: int | None = None

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        self.events.append(event)
        match event:
            case ClientMessageIn(peer=peer, message=Ping(n=n)):
                more = [SendClient(self.send_to, Pong(n=n))] if self.send_to else []
                return [SendClient(peer, Pong(n=n)), *more]
            case ClientMessageIn(peer=peer, message=List(rid=rid)):
                record = BrokerEpoch(broker_epoch=len(self.events))
                return [Append(record), SendClient(peer, Ok(rid=rid))]
            case ClientMessageIn(peer=peer, message=Status(rid=rid)):
                return [
                    SendClient(peer, Tokens(rid=rid, seq=seq, text=self.piece))
                    for seq in range(self.burst)
                ]
            case ClientMessageIn(message=Cancel()):
                self.deadline_ns = now_ns + 30_000_000
            case ClientBad(peer=peer, error=error):
                return [SendClient(peer, Error(rid=b"", error=error.info))]
            case WorkerMessageIn(peer=peer, message=WorkerPing(n=n)):
                return [SendWorker(peer, WorkerPong(n=n))]
            case WorkerMessageIn(peer=peer, message=Started(), raw=raw):
                return [SendWorker(peer, RUN, raw)]
            case Tick():
                self.deadline_ns = None
            case Shutdown():
                return [Log("info", "core.exit", {"level": "a field", "why": "asked"}), Exit(3)]
            case _:
                pass
        return []

    def next_deadline_ns(self) -> int | None:
        return self.deadline_ns

    def seen(self, kind: type, peer: bytes | None = None) -> list[Event]:
        found = [event for event in list(self.events) if isinstance(event, kind)]
        return [event for event in found if peer is None or getattr(event, "peer", None) == peer]


class Running:
    """A loop on a thread, with its sockets."""

    def __init__(self, folder: Path, endpoint: str, outbox: Outbox | None) -> None:
        self.core = ScriptedCore()
        self.lines: list[tuple[str, str, dict[str, Any]]] = []
        self.stack = ExitStack()
        self.context = zmq.Context()
        self.stack.callback(self.context.term)
        self.folder = folder
        self.journal = Journal(open_journal(folder, self.log), self.log)
        self.stack.callback(self.journal.close)
        self.clients: Port[ClientMessage] = Port(
            sockets.listen(self.context, endpoint, hwm=1_000, events=EVENTS),
            codec.CLIENT_TO_BROKER,
            codec.BROKER_TO_CLIENT,
            lambda message, error: Error(rid=getattr(message, "rid", b""), error=error.info),
            outbox,
        )
        self.stack.callback(self.clients.close)
        self.workers: Port[FromWorker] = Port(
            sockets.listen(self.context, f"ipc://{folder}/w", events=EVENTS),
            codec.WORKER_TO_BROKER,
            codec.BROKER_TO_WORKER,
            lambda message, error: None,
        )
        self.stack.callback(self.workers.close)
        life_r, self.life_w = os.pipe()
        self.stack.callback(os.close, life_r)
        self.stop = self.stack.enter_context(Stop(life_r))
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run)

    def log(self, level: str, event: str, /, **fields: Any) -> None:
        self.lines.append((level, event, fields))

    def start(self) -> Running:
        self.thread.start()
        return self

    def _run(self) -> None:
        who = identify(self.clients.endpoint)
        loop = Loop(
            self.core,
            self.clients,
            self.workers,
            who,
            self.journal,
            self.stop,
            self.log,
            drain_ms=5,
        )
        self.code = loop.run()

    def close(self) -> None:
        if self.thread.is_alive():
            self.stop.request("end of test")
            self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.stack.close()

    def connect(self, endpoint: str | None = None, hwm: int = 100) -> Peer:
        peer = Peer(sockets.connect(self.context, endpoint or self.clients.endpoint, hwm=hwm))
        self.stack.callback(peer.socket.close, 0)
        assert peer.socket.poll(WAIT_MS, zmq.POLLOUT)
        return peer


class Peer:
    """A raw client."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket

    def send(self, message: Any) -> None:
        self.socket.send_multipart(codec.CLIENT_TO_BROKER.encode(message))

    def receive(self, wait_ms: int = WAIT_MS) -> BrokerMessage:
        assert self.socket.poll(wait_ms), "no answer"
        return codec.BROKER_TO_CLIENT.decode(self.socket.recv_multipart())[0]

    def ping(self, n: int) -> None:
        self.send(Ping(n=n))
        assert self.receive() == Pong(n=n)


def until(true: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up_s, "it did not happen"
        threading.Event().wait(0.002)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vc") as name:
        yield Path(name)


Start = Callable[..., Running]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[Running] = []

    def make(endpoint: str = "", outbox: Outbox | None = None, run: bool = True) -> Running:
        running = Running(folder, endpoint or f"ipc://{folder}/c", outbox)
        started.append(running)
        return running.start() if run else running

    yield make
    for running in started:
        running.close()


# --- messages ---------------------------------------------------------------------------------


def test_messages_go_through_the_core_with_their_principal(start: Start) -> None:
    running = start()
    running.connect().ping(4)
    event = running.core.seen(ClientMessageIn)[0]
    assert isinstance(event, ClientMessageIn)
    assert (event.principal, event.same_user_ipc) == ("local", True)


def test_tcp_has_the_same_principal_without_the_right_to_name_files(start: Start) -> None:
    running = start("tcp://127.0.0.1:0")
    running.connect().ping(4)
    event = running.core.seen(ClientMessageIn)[0]
    assert isinstance(event, ClientMessageIn)
    assert (event.principal, event.same_user_ipc) == ("local", False)


def test_workers_have_a_socket_of_their_own_and_get_raw_buffers(start: Start) -> None:
    running = start()
    worker = running.connect(running.workers.endpoint)
    started = Started(broker_epoch=1, op=2, worker_epoch=3, job=3, keep=0)
    worker.socket.send_multipart(codec.WORKER_TO_BROKER.encode(started, [b"\1\0\0\0"]))
    assert worker.socket.poll(WAIT_MS)
    answer = codec.BROKER_TO_WORKER.decode(worker.socket.recv_multipart())
    assert answer == (RUN, [b"\1\0\0\0"])


def test_a_tick_comes_when_it_is_due(start: Start) -> None:
    running = start()
    peer = running.connect()
    peer.send(Cancel(rid=RID))
    until(lambda: bool(running.core.seen(Tick)))
    assert len(running.core.seen(Tick)) == 1


def test_a_record_is_in_the_file_before_the_answer_leaves(start: Start) -> None:
    running = start()
    peer = running.connect()
    peer.send(List(rid=RID))
    assert peer.receive() == Ok(rid=RID)
    opened = open_journal(running.folder, running.log)
    os.close(opened.fd)
    assert opened.restored.broker_epoch == len(running.core.events)


def test_a_connection_from_before_the_first_look_is_not_taken_for_a_closed_one(
    folder: Path,
) -> None:
    """After a restart the workers and clients are back before anything is read."""
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.term)
        listener = sockets.listen(context, f"ipc://{folder}/c", events=EVENTS)
        stack.callback(listener.close)
        early = sockets.connect(context, listener.endpoint)
        stack.callback(early.close, 0)
        for n in range(2):
            early.send_multipart(codec.CLIENT_TO_BROKER.encode(Ping(n=n)))
        assert listener.socket.poll(WAIT_MS)
        port: Port[ClientMessage] = Port(
            listener, codec.CLIENT_TO_BROKER, codec.BROKER_TO_CLIENT, lambda message, error: None
        )
        first = port.receive(0)
        assert first is not None
        port.bury(10 * SECOND_NS)
        assert port.gone == []
        port.send(first.peer, Pong(n=0), 0)
        assert early.poll(WAIT_MS)


# --- bad input --------------------------------------------------------------------------------

GOOD = codec.CLIENT_TO_BROKER.encode(Ping(n=1))
NESTED = b"\x91" * 200_000 + b"\xc0"
BAD: dict[str, tuple[list[bytes], Code, str]] = {
    "no map": ([GOOD[0]], Code.INVALID_ARGUMENT, "bad_frames"),
    "one empty frame": ([b""], Code.INVALID_ARGUMENT, "bad_frames"),
    "too many frames": ([*GOOD, b"", b"", b""], Code.INVALID_ARGUMENT, "bad_frames"),
    "very many frames": ([*GOOD, *[b"x"] * 50_000], Code.INVALID_ARGUMENT, "bad_frames"),
    "another preamble": ([b"HTTP", GOOD[1]], Code.INVALID_ARGUMENT, "bad_preamble"),
    "a request socket": ([b"", *GOOD], Code.INVALID_ARGUMENT, "bad_preamble"),
    "another major version": ([b"VMC\x63", GOOD[1]], Code.UNIMPLEMENTED, "unsupported_version"),
    "an empty map frame": ([GOOD[0], b""], Code.INVALID_ARGUMENT, "bad_message"),
    "no msgpack": ([GOOD[0], b"\xc1\xc1"], Code.INVALID_ARGUMENT, "bad_message"),
    "a cut map": ([GOOD[0], GOOD[1][:-1]], Code.INVALID_ARGUMENT, "bad_message"),
    "an array": ([GOOD[0], msgpack.packb([1, 2])], Code.INVALID_ARGUMENT, "bad_message"),
    "an unknown type": (
        [GOOD[0], msgpack.packb({"t": "FROBNICATE"})],
        Code.INVALID_ARGUMENT,
        "bad_message",
    ),
    "no type": ([GOOD[0], msgpack.packb({"n": 1})], Code.INVALID_ARGUMENT, "bad_message"),
    "a wrong field type": (
        [GOOD[0], msgpack.packb({"t": "PING", "n": "one"})],
        Code.INVALID_ARGUMENT,
        "bad_message",
    ),
    "invalid UTF-8": (
        [GOOD[0], b"\x83\xa1t\xa8REGISTER\xa3rid\xc4\x01a\xa5agent\xa2\xc3\x28"],
        Code.INVALID_ARGUMENT,
        "bad_message",
    ),
    "a deeply nested map": (
        [GOOD[0], b"\x82\xa1t\xa4PING\xa1x" + NESTED],
        Code.INVALID_ARGUMENT,
        "bad_message",
    ),
    "a giant map": (
        [GOOD[0], b"\0" * limits.MAP_BYTES_MAX],
        Code.INVALID_ARGUMENT,
        "bad_message",
    ),
    "a length bomb": (
        [GOOD[0], b"\x82\xa1t\xa4PING\xa1x\xc6\xff\xff\xff\xff"],
        Code.INVALID_ARGUMENT,
        "bad_message",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_typed_error_and_disturbs_nobody(start: Start, name: str) -> None:
    frames, code, reason = BAD[name]
    running = start()
    other, bad = running.connect(), running.connect()
    other.ping(1)
    bad.socket.send_multipart(frames)
    answer = bad.receive()
    assert isinstance(answer, Error)
    assert (answer.rid, answer.error.code, answer.error.reason) == (b"", code, reason)
    assert len(answer.error.message) > 10
    bad.ping(2)
    other.ping(3)


def test_a_frame_beyond_the_limit_costs_only_that_connection(start: Start) -> None:
    running = start()
    other, bad = running.connect(), running.connect()
    bad.ping(1)
    peer = running.core.seen(ClientMessageIn)[0].peer  # type: ignore[union-attr]
    bad.socket.send_multipart([GOOD[0], bytes(limits.FRAME_BYTES_MAX + 1)])
    until(lambda: bool(running.core.seen(ClientGone, peer)))
    other.ping(2)


def test_bytes_that_are_no_zmq_are_ignored(start: Start) -> None:
    running = start("tcp://127.0.0.1:0")
    other = running.connect()
    port = int(running.clients.endpoint.rsplit(":", 1)[1])
    with plain_socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        other.ping(1)
    other.ping(2)


def test_a_flood_of_bad_messages_is_answered_a_few_times_only(start: Start) -> None:
    running = start()
    other, bad = running.connect(), running.connect()
    for _ in range(500):
        bad.socket.send_multipart([b"HTTP", b"x"])
    bad.send(Ping(n=1))
    answers: list[BrokerMessage] = []
    while not answers or answers[-1] != Pong(n=1):
        answers.append(bad.receive())
    # The flood may straddle the limit of one second.
    assert BAD_PER_SECOND_MAX <= len(answers) - 1 <= 2 * BAD_PER_SECOND_MAX
    assert running.clients.dropped_messages >= 500 - 2 * BAD_PER_SECOND_MAX
    other.ping(2)


def test_a_bad_worker_message_is_told_to_the_core_only(start: Start) -> None:
    running = start()
    worker = running.connect(running.workers.endpoint)
    worker.socket.send_multipart([b"VMC\x63", b"x"])
    until(lambda: bool(running.core.seen(WorkerBad)))


def test_an_answer_that_no_frame_can_hold_becomes_an_error(start: Start) -> None:
    running = start()
    running.core.burst, running.core.piece = 1, "x" * (limits.MAP_BYTES_MAX + 1)
    peer = running.connect()
    peer.send(Status(rid=RID))
    answer = peer.receive()
    assert isinstance(answer, Error)
    assert (answer.rid, answer.error.reason) == (RID, "message_too_large")
    peer.ping(1)


def test_a_request_with_a_wrong_field_is_answered_by_its_rid(start: Start) -> None:
    running = start()
    peer = running.connect()
    body = {"t": "REGISTER", "rid": RID, "agent": 5, "model": "m"}
    peer.socket.send_multipart([GOOD[0], msgpack.packb(body)])
    peer.receive()
    event = running.core.seen(ClientBad)[0]
    assert isinstance(event, ClientBad)
    assert event.rid == RID


def test_trouble_with_the_disk_reaches_the_core_and_so_does_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    peer = running.connect()
    real = journal_file.write_all

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module, "write_all", full)
    peer.send(List(rid=RID))
    assert peer.receive() == Ok(rid=RID), "it goes on serving"
    until(lambda: len(running.core.seen(JournalTrouble)) == 1)
    monkeypatch.setattr(journal_module, "write_all", real)
    until(lambda: len(running.core.seen(JournalTrouble)) == 2)
    whys = [event.why for event in running.core.seen(JournalTrouble)]  # type: ignore[union-attr]
    assert "No space left on device" in whys[0]
    assert whys[1] == ""
    opened = open_journal(running.folder, running.log)
    os.close(opened.fd)
    assert opened.restored.broker_epoch > 0


# --- peers that vanish ------------------------------------------------------------------------

CHILD = """
import sys, zmq
from vram_conductor.protocol import codec, sockets
from vram_conductor.protocol.messages import Ping
socket = sockets.connect(zmq.Context(), sys.argv[1])
socket.poll(20000, zmq.POLLOUT)
socket.send_multipart(codec.CLIENT_TO_BROKER.encode(Ping(n=1)))
socket.recv_multipart()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_killed_client_is_noticed_while_nothing_is_sent_to_it(
    start: Start, transport: str
) -> None:
    running = start("tcp://127.0.0.1:0" if transport == "tcp" else "")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, running.clients.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert not running.core.seen(ClientGone)
    child.kill()
    until(lambda: bool(running.core.seen(ClientGone)))
    first = running.core.seen(ClientMessageIn)[0]
    assert isinstance(first, ClientMessageIn)
    # Over ipc the kernel knows that the process is dead, also while nobody has reaped it.
    assert running.core.seen(ClientGone) == [ClientGone(first.peer, dead=transport == "ipc")]
    child.communicate()


def test_a_killed_client_is_noticed_while_much_is_sent_to_it(start: Start) -> None:
    running = start()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, running.clients.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    first = running.core.seen(ClientMessageIn)[0]
    assert isinstance(first, ClientMessageIn)
    other = running.connect()

    def send_to_it() -> bool:
        running.core.send_to = first.peer
        other.ping(1)
        return bool(running.core.seen(ClientGone))

    child.kill()
    until(send_to_it)
    assert running.core.seen(ClientGone) == [ClientGone(first.peer, dead=True)]
    child.communicate()


def test_a_client_that_only_closes_its_connection_may_come_back(start: Start) -> None:
    running = start()
    peer = running.connect()
    peer.ping(1)
    peer.socket.close(0)
    until(lambda: bool(running.core.seen(ClientGone)))
    (event,) = running.core.seen(ClientGone)
    assert isinstance(event, ClientGone)
    assert event.dead is False


def test_a_worker_that_leaves_is_noticed(start: Start) -> None:
    running = start()
    worker = running.connect(running.workers.endpoint)
    worker.socket.send_multipart(codec.WORKER_TO_BROKER.encode(WorkerBye(worker_epoch=1)))
    until(lambda: bool(running.core.seen(WorkerMessageIn)))
    worker.socket.close(0)
    until(lambda: bool(running.core.seen(WorkerGone)))


def test_last_words_are_heard(start: Start) -> None:
    running = start()
    peer = running.connect()
    for n in range(300):
        peer.send(Ping(n=n))
    peer.socket.close(2_000)
    until(lambda: bool(running.core.seen(ClientGone)))
    until(lambda: len(running.core.seen(ClientMessageIn)) == 300)


def test_comings_and_goings_never_bury_the_living(start: Start) -> None:
    running = start()
    stable = running.connect()
    stable.ping(0)
    stable_peer = running.core.events[0].peer  # type: ignore[union-attr]
    for n in range(60):
        # The kernel gives a closed connection's descriptor to the next one at once.
        peer = running.connect()
        peer.ping(n)
        peer.socket.close(0)
        stable.ping(n)
    assert not stable.socket.poll(0), "nobody is sent what he did not ask for"
    until(lambda: len({event.peer for event in running.core.seen(ClientGone)}) == 60)  # type: ignore[union-attr]
    stable.ping(99)
    assert not running.core.seen(ClientGone, stable_peer)


# --- slow readers -----------------------------------------------------------------------------


def test_a_slow_reader_gets_everything_in_order(start: Start) -> None:
    running = start()
    running.core.burst = 15_000
    slow, other = running.connect(), running.connect()
    slow.send(Status(rid=RID))
    # More than libzmq queues on both sides: the rest waits in the outbox.
    until(lambda: running.clients.outbox.bytes > 0)
    other.ping(1)
    for seq in range(15_000):
        assert slow.receive() == Tokens(rid=RID, seq=seq, text="x")
    slow.ping(2)
    assert not running.core.seen(ClientGone)
    assert running.clients.outbox.bytes == 0


def test_the_core_is_told_who_is_behind_and_who_has_caught_up(start: Start) -> None:
    running = start()
    running.core.burst, running.core.piece = 5_000, "x" * 500
    slow, other = running.connect(), running.connect()
    slow.send(Status(rid=RID))
    until(lambda: bool(running.core.seen(ClientFlow)))
    first = running.core.seen(ClientMessageIn)[0]
    assert isinstance(first, ClientMessageIn)
    assert running.core.seen(ClientFlow) == [ClientFlow(first.peer, behind=True)]
    other.ping(1)
    for _ in range(5_000):
        slow.receive()
    until(lambda: len(running.core.seen(ClientFlow)) == 2)
    assert running.core.seen(ClientFlow)[1] == ClientFlow(first.peer, behind=False)


def test_a_message_never_overtakes_one_that_waits(start: Start) -> None:
    port = start(run=False).clients
    peer = Peer(sockets.connect(zmq.Context.instance(), port.endpoint, hwm=10))
    try:
        assert peer.socket.poll(WAIT_MS, zmq.POLLOUT)
        peer.send(Ping(n=1))
        assert port.socket.poll(WAIT_MS)
        incoming = port.receive(0)
        assert incoming is not None
        sent = 0
        while not len(port.outbox):
            port.send(incoming.peer, Pong(n=sent), 0)
            sent += 1
        now_ns = 0
        for n in range(2 * sent - 1):
            if n < sent - 1:
                # There is room again, but only flush may use it while something waits.
                assert peer.receive() == Pong(n=n)
                port.send(incoming.peer, Pong(n=sent + n), 0)
                continue
            while not peer.socket.poll(1):
                now_ns += FLUSH_NS
                port.flush(now_ns)
            assert peer.receive() == Pong(n=n)
        assert not len(port.outbox)
    finally:
        peer.socket.close(0)


def test_a_reader_that_never_reads_is_dropped_and_hurts_nobody(start: Start) -> None:
    running = start(outbox=Outbox(peer_bytes_max=300_000))
    running.core.burst = 5_000
    running.core.piece = "y" * 1_000
    dead, other = running.connect(), running.connect()
    other.ping(0)
    most = 0
    for n in range(20):
        dead.send(Status(rid=RID))
        other.ping(n)
        most = max(most, running.clients.outbox.bytes)
    until(lambda: len(running.core.seen(ClientMessageIn)) == 41)
    assert most <= 300_000
    assert running.core.seen(ClientGone)
    assert running.clients.dropped_peers >= 1
    other.ping(99)
    # It may come back on the same connection. What it finds there is the beginning of each
    # burst, without a gap: nothing is sent behind what was dropped.
    dead.send(Ping(n=7))
    expected = 0
    while (message := dead.receive()) != Pong(n=7):
        assert isinstance(message, Tokens)
        assert message.seq in (expected, 0)
        expected = message.seq + 1


def test_large_answers_that_nobody_reads_are_bounded_by_bytes(start: Start) -> None:
    running = start()
    running.core.burst, running.core.piece = 1, "x" * MIB
    slow, other = running.connect(hwm=1), running.connect()
    for n in range(60):
        slow.send(Status(rid=RID))
        if n % 8 == 0:
            other.ping(n)
    until(lambda: bool(running.core.seen(ClientGone)))
    other.ping(99)
    events = list(running.core.events)
    gone = next(event for event in events if isinstance(event, ClientGone))
    asked = [event for event in events[: events.index(gone)] if isinstance(event, ClientMessageIn)]
    answers = sum(event.peer == gone.peer for event in asked)
    # It took what libzmq and the kernel hold, what waited, and not one more.
    assert answers * MIB <= PEER_BYTES_MAX + IN_FLIGHT_BYTES_MAX + 4 * MIB


def test_large_answers_arrive_whole_and_in_order_among_small_ones(start: Start) -> None:
    running = start()
    slow = running.connect()
    sizes = [MIB, 10, 3 * MIB, LARGE_BYTES, LARGE_BYTES - 1, 6 * MIB, 5]
    for size in sizes:
        running.core.burst, running.core.piece = 2, "y" * size
        slow.send(Status(rid=RID))
        seen = len(running.core.seen(ClientMessageIn))
        until(lambda seen=seen: len(running.core.seen(ClientMessageIn)) >= seen)  # type: ignore[misc]
        for seq in range(2):
            assert slow.receive() == Tokens(rid=RID, seq=seq, text="y" * size)
    assert running.clients.outbox.bytes == 0


def test_all_slow_readers_together_are_bounded(start: Start) -> None:
    running = start(outbox=Outbox(peer_bytes_max=10_000_000, total_bytes_max=3_000_000))
    running.core.burst = 4_000
    running.core.piece = "z" * 700
    peers = [running.connect() for _ in range(4)]
    other = running.connect()
    for n, peer in enumerate(peers):
        peer.send(Status(rid=RID))
        until(lambda n=n: len(running.core.seen(ClientMessageIn)) == 2 * n + 1)  # type: ignore[misc]
        other.ping(n)
        assert 0 < running.clients.outbox.bytes <= 3_000_000
    assert running.core.seen(ClientGone)
    other.ping(9)


# --- fairness, stopping -----------------------------------------------------------------------


def test_a_flood_on_one_socket_does_not_starve_the_other(start: Start) -> None:
    running = start(run=False)
    flood = running.connect(hwm=1_000)
    worker = running.connect(running.workers.endpoint, hwm=1_000)
    for n in range(900):
        flood.send(Ping(n=n))
        worker.socket.send_multipart(codec.WORKER_TO_BROKER.encode(WorkerPing(n=n, steps=0)))
    until(lambda: bool(running.clients.socket.poll(0) and running.workers.socket.poll(0)))
    running.start()
    until(lambda: len(running.core.events) == 1_800)
    kinds = [isinstance(event, ClientMessageIn) for event in running.core.events]
    first_worker = kinds.index(False)
    assert first_worker <= MESSAGES_PER_TURN
    longest = max(len(list(run)) for _, run in itertools.groupby(kinds))
    # The tail, when one of them has nothing left, may be longer than a turn.
    assert longest <= 4 * MESSAGES_PER_TURN


def test_a_flood_of_bad_messages_does_not_starve_the_other_socket(start: Start) -> None:
    running = start(run=False)
    flood = running.connect(hwm=1_000)
    worker = running.connect(running.workers.endpoint)
    for _ in range(900):
        flood.socket.send_multipart([b"HTTP", b"x"])
    worker.socket.send_multipart(codec.WORKER_TO_BROKER.encode(WorkerPing(n=1, steps=0)))
    until(lambda: bool(running.clients.socket.poll(0) and running.workers.socket.poll(0)))
    dropped: list[int] = []
    real = running.core.handle

    def handle(event: Event, now_ns: int) -> list[Effect]:
        if isinstance(event, WorkerMessageIn):
            dropped.append(running.clients.dropped_messages)
        return real(event, now_ns)

    running.core.handle = handle  # type: ignore[method-assign]
    running.start()
    until(lambda: bool(dropped))
    assert dropped[0] <= MESSAGES_PER_TURN


def test_a_stop_request_drains_and_ends_with_the_cores_code(start: Start) -> None:
    running = start()
    running.connect().ping(1)
    running.stop.request("SIGTERM")
    running.thread.join(WAIT_S)
    assert running.code == 3
    assert running.core.seen(Shutdown) == [Shutdown(5)]
    assert ("info", "core.exit", {"level": "a field", "why": "asked"}) in running.lines
    os.close(running.life_w)


def test_the_end_of_the_supervisors_pipe_is_a_stop(start: Start) -> None:
    running = start()
    running.connect().ping(1)
    os.close(running.life_w)
    running.thread.join(WAIT_S)
    assert running.code == 3


def test_an_idle_loop_does_not_spin(start: Start) -> None:
    running = start()
    running.connect().ping(1)
    before_s = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before_s < 0.25
