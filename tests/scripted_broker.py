"""A broker that does what a test says: a real ROUTER socket in a thread.

Out of the box it answers like a broker with one canned model. A test changes single behaviours
by replacing ``on`` handlers, or takes messages by hand with ``expect``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.codec import BROKER_TO_CLIENT, CLIENT_TO_BROKER
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.sockets import SendResult, listen, receive, send
from vram_conductor.protocol.status import AgentList, AgentStatus, LeaseStatus, StatusReport
from vram_conductor.protocol.stream import SendStream
from vram_conductor.protocol.values import Usage

PIECES = ("one", ", two", ", three.")
PATIENCE_S = 20.0

M = TypeVar("M", bound=Base)
Handler = Callable[["Peer", Any], None]


def eventually(check: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Poll until ``check()``; fail after ``patience_s``."""
    until = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < until, f"not within {patience_s} s: {what}"
        time.sleep(0.002)


def error_info(code: Code, reason: str, **details: Any) -> ErrorInfo:
    return ErrorInfo(code, reason, f"scripted {reason}", details=details)


class Peer:
    """One connected client; answers go to it."""

    def __init__(self, broker: ScriptedBroker, identity: bytes) -> None:
        self.broker = broker
        self.identity = identity

    def send(self, message: Base) -> None:
        self.send_frames(BROKER_TO_CLIENT.encode(message))

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self.broker.outbox.put((self.identity, list(frames)))

    def reply(self, rid: bytes, pieces: Sequence[str] = PIECES, usage: Usage | None = None) -> None:
        """A whole reply."""
        for seq, text in enumerate(pieces):
            self.send(wire.Tokens(rid=rid, seq=seq, text=text, ids=[seq]))
        self.done(rid, len(pieces), usage)

    def done(self, rid: bytes, seq: int, usage: Usage | None = None) -> None:
        usage = usage or Usage(generated_tokens=seq)
        self.send(wire.Done(rid=rid, seq=seq, usage=usage))

    def fail(self, rid: bytes, info: ErrorInfo, seq: int | None = None) -> None:
        self.send(wire.Error(rid=rid, error=info, seq=seq))


class ScriptedBroker:
    """See the module. ``received`` has every message, in order of arrival."""

    def __init__(self, endpoint: str, *, epoch: int = 1, heartbeat_ms: int = 500) -> None:
        self.epoch = epoch
        self.heartbeat_ms = heartbeat_ms
        self.received: list[tuple[Peer, wire.ClientMessage]] = []
        self.outbox: queue.SimpleQueue[tuple[bytes, list[bytes]]] = queue.SimpleQueue()
        self.streams: dict[bytes, SendStream] = {}
        self.on: dict[type, Handler] = dict(_DEFAULTS)
        self.mute = False
        self.features = ["structured_output"]
        self.pieces: Sequence[str] = PIECES
        self.calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self.agents: dict[str, AgentStatus] = {}
        self.leases: dict[str, LeaseStatus] = {}
        self._taken = 0
        self._sessions: set[bytes] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener = listen(self._context, endpoint)
        self._wanted = endpoint
        self._down = threading.Event()
        self._rebind = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted-broker", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, kind: type[M], patience_s: float = PATIENCE_S) -> tuple[Peer, M]:
        """The next message of this type that was not taken yet; others before it are skipped."""
        until = time.monotonic() + patience_s
        while True:
            while self._taken < len(self.received):
                peer, message = self.received[self._taken]
                self._taken += 1
                if isinstance(message, kind):
                    return peer, message
            assert time.monotonic() < until, f"no {kind.__name__} within {patience_s} s"
            time.sleep(0.002)

    def of(self, kind: type[M]) -> list[M]:
        """All messages of this type so far."""
        return [message for _, message in list(self.received) if isinstance(message, kind)]

    def cut(self, *, epoch: int | None = None) -> None:
        """Close the socket and everything on its way, then bind again; a new ``epoch`` means a
        restarted broker, which remembers nothing."""
        if epoch is not None:
            self.epoch = epoch
        self._rebind.set()
        eventually(lambda: not self._rebind.is_set(), "rebound")

    def forget_sessions(self) -> None:
        """Every client has to say HELLO again. For :meth:`do`."""
        self._sessions.clear()

    def do(self, call: Callable[[], None]) -> None:
        """Run something in the broker's thread, which owns the streams; wait for it."""
        event = threading.Event()
        self.calls.put((call, event))
        assert event.wait(PATIENCE_S), "the broker's thread is gone"

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._rebind.is_set():
                self._bind_again()
            with contextlib.suppress(queue.Empty):
                while True:
                    call, event = self.calls.get_nowait()
                    call()
                    event.set()
            socket = self._listener.socket
            with contextlib.suppress(queue.Empty):
                while True:
                    identity, frames = self.outbox.get_nowait()
                    assert send(socket, frames, identity) is not SendResult.FULL
            if not socket.poll(2):
                continue
            while (got := receive(socket)) is not None:
                message, _ = CLIENT_TO_BROKER.decode(got.frames)
                self._take(Peer(self, got.peer), message)
        self._listener.close()
        self._context.destroy(linger=0)

    def _bind_again(self) -> None:
        self._listener.socket.setsockopt(zmq.LINGER, 0)
        endpoint = self._listener.endpoint
        self._listener.close()
        self._sessions.clear()
        while not self.outbox.empty():
            self.outbox.get_nowait()
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._listener = listen(self._context, endpoint)
                break
            except Exception:
                assert time.monotonic() < until
                time.sleep(0.01)
        self._rebind.clear()

    def _take(self, peer: Peer, message: wire.ClientMessage) -> None:
        self.received.append((peer, message))
        if self.mute:
            return
        if isinstance(message, wire.Hello):
            self._sessions.add(peer.identity)
        elif peer.identity not in self._sessions:
            rid = getattr(message, "rid", b"")
            peer.fail(rid, error_info(Code.FAILED_PRECONDITION, "no_session"))
            return
        if (handler := self.on.get(type(message))) is not None:
            handler(peer, message)


def nothing(peer: Peer, message: Any) -> None:
    """A handler that stays silent."""


def _hello(peer: Peer, message: wire.Hello) -> None:
    broker = peer.broker
    peer.send(
        wire.Welcome(
            v=(1, 0),
            session=peer.identity.hex(),
            broker_epoch=broker.epoch,
            principal="local",
            heartbeat_ms=broker.heartbeat_ms,
            limits={"n_ctx_max": 4096},
            features=broker.features,
        )
    )


def _register(peer: Peer, message: wire.Register) -> None:
    status = AgentStatus(
        principal="local",
        agent=message.agent,
        model=message.model,
        model_id="0123",
        device="cpu",
        state="ready",
        n_ctx=message.n_ctx or 4096,
    )
    peer.broker.agents[message.agent] = status
    peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(status)))


def _unregister(peer: Peer, message: wire.Unregister) -> None:
    if peer.broker.agents.pop(message.agent, None) is None:
        peer.fail(message.rid, error_info(Code.NOT_FOUND, "no_such_agent"))
    else:
        peer.send(wire.Ok(rid=message.rid))


def lease_status(message: wire.Lease, **fields: Any) -> LeaseStatus:
    whole: dict[str, Any] = {
        "principal": "local",
        "name": message.name,
        "device": message.device or "cpu",
        "bytes": message.lease_bytes,
        "state": "held",
        "ttl_s": message.ttl_s,
        "left_ms": 1000 * message.ttl_s,
        "park": message.park,
        "ephemeral": message.ephemeral,
    }
    return LeaseStatus(**{**whole, **fields})


def _lease(peer: Peer, message: wire.Lease) -> None:
    leases = peer.broker.leases
    if not message.ends:
        leases[message.name] = lease_status(message)
        peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(leases[message.name])))
    elif leases.pop(message.name, None) is None:
        peer.fail(message.rid, error_info(Code.NOT_FOUND, "no_such_lease"))
    else:
        peer.send(wire.Ok(rid=message.rid))


def _list(peer: Peer, message: wire.List) -> None:
    agents = AgentList(agents=list(peer.broker.agents.values()))
    peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(agents)))


def _status(peer: Peer, message: wire.Status) -> None:
    report = StatusReport(broker_epoch=peer.broker.epoch, version="scripted")
    peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(report)))


def open_stream(peer: Peer, message: wire.Decode, pieces: Sequence[str]) -> SendStream:
    """Accept a job, or re-attach to it; its output so far is ``pieces``."""
    peer.send(wire.Accepted(rid=message.rid, job=1, position=0))
    stream = peer.broker.streams.get(message.rid)
    if stream is None:
        stream = peer.broker.streams[message.rid] = SendStream(message.window)
        for seq, text in enumerate(pieces):
            stream.append(text, (seq,))
    else:
        stream.resume(0, message.window)
    return stream


def whole(peer: Peer, message: wire.Decode) -> None:
    """DECODE: the whole canned reply."""
    open_stream(peer, message, peer.broker.pieces).finish()
    pump(peer, message.rid)


def begun(peer: Peer, message: wire.Decode) -> None:
    """DECODE: ``broker.pieces``, and no end."""
    open_stream(peer, message, peer.broker.pieces)
    pump(peer, message.rid)


def _credit(peer: Peer, message: wire.Credit) -> None:
    if (stream := peer.broker.streams.get(message.rid)) is not None:
        stream.credit(message.upto)
        pump(peer, message.rid)


def _resume(peer: Peer, message: wire.Resume) -> None:
    stream = peer.broker.streams.get(message.rid)
    if stream is None:
        peer.fail(message.rid, error_info(Code.NOT_FOUND, "unknown_rid"))
        return
    stream.resume(message.from_seq, message.window)
    pump(peer, message.rid)


def pump(peer: Peer, rid: bytes, usage: Usage | None = None) -> None:
    """Send what the stream of ``rid`` may send now."""
    stream = peer.broker.streams[rid]
    while pieces := stream.take():
        for piece in pieces:
            peer.send(wire.Tokens(rid=rid, seq=piece.seq, text=piece.text, ids=list(piece.ids)))
    if stream.take_end():
        peer.done(rid, stream.produced, usage)


def _cancel(peer: Peer, message: wire.Cancel) -> None:
    peer.fail(message.rid, error_info(Code.CANCELLED, "cancelled"))


_DEFAULTS: dict[type, Handler] = {
    wire.Hello: _hello,
    wire.Register: _register,
    wire.Unregister: _unregister,
    wire.Lease: _lease,
    wire.List: _list,
    wire.Status: _status,
    wire.Decode: whole,
    wire.Credit: _credit,
    wire.Resume: _resume,
    wire.Cancel: _cancel,
    wire.Reset: lambda peer, message: peer.send(wire.Ok(rid=message.rid, body={"version": 1})),
    wire.Ping: lambda peer, message: peer.send(wire.Pong(n=message.n)),
}
