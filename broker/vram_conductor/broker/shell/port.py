"""One bound ROUTER with what makes it safe: bounded sending, bounded receiving, gone peers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq

from vram_conductor.broker.shell.large_sends import LARGE_BYTES, LargeSends
from vram_conductor.broker.shell.outbox import Outbox
from vram_conductor.broker.shell.peer_watch import Gone, PeerWatch
from vram_conductor.broker.shell.users import Users
from vram_conductor.protocol import limits
from vram_conductor.protocol.codec import Codec, peek_rid
from vram_conductor.protocol.errors import ConductorError, InvalidArgument
from vram_conductor.protocol.sockets import Listener, Socket

M = TypeVar("M")

BEHIND_BYTES = 256 * 1024
"""A peer for which so much waits here is behind; it has caught up when nothing does."""

FLUSH_NS = 2_000_000
"""How often to offer waiting messages again; a ROUTER cannot be polled for one peer's room."""

BAD_PER_SECOND_MAX = 8
"""Undecodable messages of one peer that get an answer; the rest is dropped."""

BAD_PEERS_MAX = 1_024
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_LAST = int(zmq.DONTWAIT)
SECOND_NS = 1_000_000_000


Instead = Callable[[msgspec.Struct, ConductorError], msgspec.Struct | None]
"""What to send in place of a message that cannot be encoded (a status of more than one frame)."""


class Incoming(NamedTuple, Generic[M]):
    """One message of a peer: decoded, or the error that says why it could not be, with the
    request id if that much was readable. Neither: one of a flood of bad ones; ignore it.
    ``user``: whom the ZAP handler has let in; empty where it was not asked."""

    peer: bytes
    message: M | None
    raw: list[bytes]
    error: ConductorError | None
    rid: bytes = b""
    user: str = ""


class Port(Generic[M]):
    """A ROUTER of the broker.

    Args:
        listener: from ``sockets.listen``, with ``peer_watch.EVENTS``.
        incoming: decodes what peers send.
        outgoing: encodes what we send.
        instead: see Instead.

    Attributes:
        gone: peers that left or were dropped; the owner takes them with ``take_gone``.
        users: whom its peers have proved to be.
        dropped_messages: undecodable messages that got no answer.
        dropped_peers: how many peers were given up because they did not read.
    """

    def __init__(
        self,
        listener: Listener,
        incoming: Codec[M],
        outgoing: Codec[Any],
        instead: Instead,
        outbox: Outbox | None = None,
    ) -> None:
        self.socket: Socket = listener.socket
        self.endpoint = listener.endpoint
        self.outbox = outbox if outbox is not None else Outbox()
        self.gone: list[Gone] = []
        self.users = Users()
        self.dropped_messages = 0
        self.dropped_peers = 0
        self._listener = listener
        self._decode = incoming.decode
        self._encode = outgoing.encode
        self._instead = instead
        assert listener.monitor is not None
        self._watch = PeerWatch(listener.monitor)
        self._flush_at_ns = 0
        self._cut_off: set[bytes] = set()
        self._large = LargeSends()
        self._behind: set[bytes] = set()
        self._flow: dict[bytes, bool] = {}
        self._bad: dict[bytes, tuple[int, int]] = {}

    @property
    def monitor(self) -> Socket:
        """To be polled beside ``socket``; then call ``read_news``."""
        return self._watch.monitor

    # --- receiving ----------------------------------------------------------------------------

    def receive(self, now_ns: int) -> Incoming[M] | None:
        """The next message, without blocking; None if there is none."""
        try:
            # Frames (copy=False) tell ``more`` without a system call and know their origin.
            first = self.socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        peer = first.bytes
        if not self._watch.known(peer):
            self._meet(peer, first, now_ns)
        frames: list[bytes] = []
        count, more = 0, first.more
        while more:
            part = self.socket.recv(copy=False)
            count, more = count + 1, part.more
            # Frames beyond the limit are drained but not kept.
            if count <= limits.FRAMES_MAX:
                frames.append(part.bytes)
        incoming = self._decoded(peer, first, frames, count)
        if incoming.error is None or self._answers_bad(peer, now_ns):
            return incoming
        self.dropped_messages += 1
        return Incoming(peer, None, [], None)

    def _meet(self, peer: bytes, frame: zmq.Frame, now_ns: int) -> None:
        try:
            fd = int(frame.get(int(zmq.MessageOption.SRCFD)))
        except zmq.ZMQError:  # inproc has no descriptor
            fd = -1
        self.users.met(peer, frame)
        self._watch.met(peer, fd, now_ns)

    def _decoded(
        self, peer: bytes, first: zmq.Frame, frames: list[bytes], count: int
    ) -> Incoming[M]:
        try:
            self.users.check(peer, first)
            if count > limits.FRAMES_MAX:
                raise InvalidArgument(
                    "bad_frames",
                    f"a message has 2 to {limits.FRAMES_MAX} frames, this one has {count}",
                    frames=count,
                )
            message, raw = self._decode(frames)
        except ConductorError as error:
            return Incoming(peer, None, [], error, peek_rid(frames), self.users.of(peer))
        return Incoming(peer, message, raw, None, user=self.users.of(peer))

    def _answers_bad(self, peer: bytes, now_ns: int) -> bool:
        """Whether this undecodable message gets an answer; a flood of them does not."""
        since_ns, count = self._bad.get(peer, (now_ns, 0))
        if now_ns - since_ns >= SECOND_NS:
            since_ns, count = now_ns, 0
        if peer not in self._bad and len(self._bad) >= BAD_PEERS_MAX:
            self._bad.clear()
        self._bad[peer] = (since_ns, count + 1)
        return count < BAD_PER_SECOND_MAX

    # --- sending ------------------------------------------------------------------------------

    def send(
        self, peer: bytes, message: msgspec.Struct, now_ns: int, raw: list[bytes] | None = None
    ) -> None:
        """Send, or keep for later, or note that the peer is gone. Never blocks, never raises."""
        if peer in self._cut_off:
            # A message behind one that was dropped would be a gap in a stream.
            return
        try:
            frames = self._encode(message, raw or ())
        except ConductorError as error:
            other = self._instead(message, error)
            if other is None:
                return
            frames = self._encode(other)
        if peer in self.outbox or not self._offer(peer, frames, now_ns):
            self._keep(peer, frames, now_ns)

    def flush(self, now_ns: int) -> None:
        """Offer again what waits."""
        if not len(self.outbox) or now_ns < self._flush_at_ns:
            return
        self._flush_at_ns = now_ns + FLUSH_NS
        for peer in self.outbox.peers():
            while (frames := self.outbox.first(peer)) is not None and self._offer(
                peer, frames, now_ns
            ):
                if peer in self.outbox:
                    self.outbox.sent(peer, now_ns)
            if self.outbox.stalled(peer, now_ns):
                self._drop(peer)
            elif peer in self._behind and peer not in self.outbox:
                self._behind.discard(peer)
                self._flow[peer] = False

    def _offer(self, peer: bytes, frames: list[bytes], now_ns: int) -> bool:
        """False if the peer's queue is full. A gone peer counts as sent."""
        large_bytes = sum(len(frame) for frame in frames if len(frame) >= LARGE_BYTES)
        if large_bytes and not self._large.room(peer, large_bytes):
            return False
        try:
            # Only the first part can fail; then nothing of the message has left. (This is
            # send_multipart without its arithmetic on enums, which costs as much as the sending.)
            send = self.socket.send
            send(peer, _MORE)
            if large_bytes:
                self._send_large(peer, frames)
                return True
            for part in frames[:-1]:
                send(part, _MORE)
            send(frames[-1], _LAST)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._cut(peer)
            self._watch.lost(peer, now_ns)
        return True

    def _send_large(self, peer: bytes, frames: list[bytes]) -> None:
        """What follows the routing id, of which some frames are large."""
        for index, part in enumerate(frames, 1):
            flags = _LAST if index == len(frames) else _MORE
            if len(part) < LARGE_BYTES:
                self.socket.send(part, flags)
            else:
                tracker = self.socket.send(part, flags, copy=False, track=True)
                self._large.sent(peer, len(part), tracker)

    def _keep(self, peer: bytes, frames: list[bytes], now_ns: int) -> None:
        for victim in self.outbox.push(peer, frames, now_ns):
            self._drop(victim)
        if peer not in self._behind and self.outbox.waiting_bytes(peer) > BEHIND_BYTES:
            self._behind.add(peer)
            self._flow[peer] = True

    def take_flow(self) -> list[tuple[bytes, bool]]:
        """Who has fallen behind (True) or caught up since the last call."""
        if not self._flow:
            return []
        flow, self._flow = self._flow, {}
        return list(flow.items())

    # --- gone peers ---------------------------------------------------------------------------

    def read_news(self, now_ns: int) -> None:
        """The monitor has news."""
        self._watch.read_news(now_ns)

    def bury(self, now_ns: int) -> None:
        """Find out about peers whose connection was closed; hang up where it is time to."""
        for peer in self.users.take_due(now_ns):
            self._watch.hang_up(peer, now_ns)
        for gone in self._watch.left(now_ns):
            self._cut(gone.peer)
            self.gone.append(gone)

    def take_gone(self) -> Gone:
        """One of ``gone``; the owner forgets its session before it sends to it again."""
        gone = self.gone.pop(0)
        self._cut_off.discard(gone.peer)
        self.users.forget(gone.peer)
        return gone

    def next_deadline_ns(self) -> int | None:
        """When to call ``flush`` and ``bury`` at the latest."""
        times = [self._watch.next_deadline_ns(), self.users.next_ns()]
        if len(self.outbox):
            times.append(self._flush_at_ns)
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def close(self) -> None:
        """Close the socket; messages that it has accepted still leave (LINGER)."""
        self._listener.close()

    def _cut(self, peer: bytes) -> None:
        """Nothing is sent to the peer any more."""
        self.outbox.forget(peer)
        self._bad.pop(peer, None)
        self._flow.pop(peer, None)
        self._large.forget(peer)
        self._behind.discard(peer)
        self._cut_off.add(peer)

    def _drop(self, peer: bytes) -> None:
        """It does not read."""
        self.dropped_peers += 1
        self._cut(peer)
        self._watch.forget(peer)
        self.gone.append(Gone(peer, dead=False))
