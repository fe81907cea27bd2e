"""Connections that break, brokers that restart, messages that get lost or are nonsense."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_broker import (
    PIECES,
    Peer,
    ScriptedBroker,
    begun,
    error_info,
    eventually,
    nothing,
    open_stream,
    pump,
)

from vram_conductor.client import AsyncConductor, Conductor, Unavailable
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.limits import PREAMBLE

PIECES_MAX = 30


@pytest.fixture
def conductor(broker: ScriptedBroker) -> Iterator[Conductor]:
    with Conductor(broker.endpoint) as conductor:
        yield conductor


def finish(broker: ScriptedBroker, rid: bytes, more: list[str]) -> None:
    """Give the stream the rest of its output, for whoever resumed it last."""
    peer, _ = broker.expect(wire.Resume)

    def feed() -> None:
        stream = broker.streams[rid]
        for text in more:
            stream.append(text)
        stream.finish()
        pump(peer, rid)

    broker.do(feed)


def test_a_connection_lost_in_mid_stream(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x")
    assert [next(reply) for _ in PIECES] == list(PIECES)
    broker.cut()
    finish(broker, reply.rid, [" four", " five"])
    assert list(reply) == [" four", " five"]
    assert reply.result().text == "".join(PIECES) + " four five"
    assert [message.from_seq for message in broker.of(wire.Resume)] == [3]


def test_what_was_on_its_way_when_the_connection_broke_comes_once(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    """Pieces that the broker gave to a socket that died are neither lost nor doubled."""
    pieces = [f"{number} " for number in range(PIECES_MAX)]

    def swallow(peer: Peer, message: wire.Decode) -> None:
        stream = open_stream(peer, message, pieces)
        sent = stream.take()
        for piece in sent[:10]:
            peer.send(wire.Tokens(rid=message.rid, seq=piece.seq, text=piece.text))

    broker.on[wire.Decode] = swallow
    reply = conductor.agent("a").chat("x")
    assert [next(reply) for _ in range(10)] == pieces[:10]
    broker.cut()
    finish(broker, reply.rid, [])
    assert list(reply) == pieces[10:]


def test_a_window_survives_a_reconnect(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.pieces = [f"{number} " for number in range(PIECES_MAX)]
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x", window=4)
    read = [next(reply) for _ in range(5)]
    broker.cut()
    finish(broker, reply.rid, ["end"])
    assert read + list(reply) == [*broker.pieces, "end"]


def test_many_replies_survive_one_cut(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    replies = [conductor.agent("a").chat("x") for _ in range(100)]
    for reply in replies:
        assert next(reply) == PIECES[0]

    def end(peer: Peer, message: wire.Resume) -> None:
        broker.streams[message.rid].resume(message.from_seq, message.window)
        broker.streams[message.rid].finish()
        pump(peer, message.rid)

    broker.on[wire.Resume] = end
    broker.cut()
    for reply in replies:
        assert reply.result(20).text == "".join(PIECES)


def test_requests_survive_a_cut(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Register] = nothing
    results: queue.SimpleQueue[str] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: results.put(conductor.register("a", "m").name))
    thread.start()
    first = broker.expect(wire.Register)[1]
    broker.on[wire.Register] = lambda peer, message: peer.send(wire.Ok(rid=message.rid))
    broker.cut()
    assert results.get(timeout=20) == "a"
    thread.join()
    assert broker.expect(wire.Register)[1] == first


def test_a_restarted_broker(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x")
    assert next(reply) == PIECES[0]
    broker.streams.clear()
    broker.cut(epoch=2)
    with pytest.raises(Unavailable) as caught:
        reply.result()
    assert caught.value.reason == "broker_restarted"
    assert caught.value.retryable
    assert caught.value.details == {"received_pieces": 3, "received_chars": 16}
    assert reply.text == "".join(PIECES)
    assert len(broker.of(wire.Decode)) == 1
    assert conductor.broker_epoch == 2
    assert conductor.ping() > 0


def test_an_idle_connection_comes_back_by_itself(patient_broker: ScriptedBroker) -> None:
    with Conductor(patient_broker.endpoint) as conductor:
        patient_broker.cut()
        eventually(lambda: len(patient_broker.of(wire.Hello)) == 2, "HELLO again")
        assert conductor.ping() > 0


def test_a_broker_that_forgot_the_session_is_noticed(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.do(broker.forget_sessions)
    assert conductor.list() == []
    assert len(broker.of(wire.Hello)) == 2


def test_a_broker_that_stays_silent_is_noticed_by_heartbeat(short_tmp: Path) -> None:
    with (
        ScriptedBroker(f"ipc://{short_tmp}/b.ipc", heartbeat_ms=20) as broker,
        Conductor(broker.endpoint, connect_timeout_s=0.3, reconnect_s=0.3) as conductor,
    ):
        broker.on[wire.Decode] = begun
        reply = conductor.agent("a").chat("x")
        assert next(reply) == PIECES[0]
        broker.mute = True
        with pytest.raises(Unavailable) as caught:
            reply.result(20)
        assert caught.value.reason == "connection_lost"
        assert caught.value.retryable
        with pytest.raises(Unavailable) as gone:
            conductor.list()
        assert gone.value.reason == "no_broker"
        # The same Conductor works again when there is a broker again.
        broker.mute = False
        assert conductor.list() == []


def test_a_lost_piece_is_asked_for(broker: ScriptedBroker, conductor: Conductor) -> None:
    def leaky(peer: Peer, message: wire.Decode) -> None:
        stream = open_stream(peer, message, PIECES)
        stream.finish()
        for piece in stream.take():
            if piece.seq != 1:
                peer.send(wire.Tokens(rid=message.rid, seq=piece.seq, text=piece.text))
        peer.done(message.rid, len(PIECES))

    broker.on[wire.Decode] = leaky
    reply = conductor.agent("a").chat("x")
    assert list(reply) == list(PIECES)
    assert broker.expect(wire.Resume)[1].from_seq == 1


def test_duplicates_and_another_order(broker: ScriptedBroker, conductor: Conductor) -> None:
    def shuffled(peer: Peer, message: wire.Decode) -> None:
        peer.done(message.rid, 3)
        for seq in (2, 2, 0, 1, 0):
            peer.send(wire.Tokens(rid=message.rid, seq=seq, text=PIECES[seq]))
        peer.done(message.rid, 3)

    broker.on[wire.Decode] = shuffled
    broker.on[wire.Resume] = nothing
    assert list(conductor.agent("a").chat("x")) == list(PIECES)


NONSENSE: dict[str, list[bytes]] = {
    "nothing": [b""],
    "no map": [PREAMBLE],
    "wrong preamble": [b"HTTP", b"\x80"],
    "another version": [b"VMC\x09", b"\x80"],
    "no msgpack": [PREAMBLE, b"\xc1\xff\x00"],
    "cut short": [PREAMBLE, b"\x85\xa1t\xa6TOKENS"],
    "unknown type": [PREAMBLE, b"\x81\xa1t\xa4WHAT"],
    "wrong field": [PREAMBLE, b"\x83\xa1t\xa6TOKENS\xa3rid\x01\xa3seq\xa1x"],
    "nested": [PREAMBLE, b"\x91" * 200_000],
    "too many frames": [PREAMBLE, b"\x80", b"", b"", b"", b""],
}


@pytest.mark.parametrize("frames", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_from_the_broker_is_ignored_with_a_warning(
    broker: ScriptedBroker,
    conductor: Conductor,
    frames: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def odd(peer: Peer, message: wire.Decode) -> None:
        peer.send(wire.Tokens(rid=message.rid, seq=0, text="a"))
        peer.send_frames(frames)
        peer.send(wire.Tokens(rid=message.rid, seq=1, text="b"))
        peer.done(message.rid, 2)

    broker.on[wire.Decode] = odd
    with caplog.at_level(logging.WARNING, "vram_conductor.client"):
        assert conductor.agent("a").chat("x").result().text == "ab"
    assert "ignored a message of the broker" in caplog.text


def test_a_flood_of_nonsense_does_not_flood_the_log(
    broker: ScriptedBroker, conductor: Conductor, caplog: pytest.LogCaptureFixture
) -> None:
    def flood(peer: Peer, message: wire.Decode) -> None:
        for _ in range(500):
            peer.send_frames([b"HTTP", b""])
        peer.reply(message.rid)

    broker.on[wire.Decode] = flood
    with caplog.at_level(logging.WARNING, "vram_conductor.client"):
        assert conductor.agent("a").chat("x").result().text == "".join(PIECES)
    assert 1 <= len(caplog.records) <= 20


def test_a_draining_broker(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x")
    assert next(reply) == PIECES[0]
    peer, _ = broker.expect(wire.Decode)
    peer.send(wire.GoAway(reason="shutdown", drain_ms=1_500))
    conductor.ping()
    late = conductor.agent("a").chat("y")
    peer.done(reply.rid, 3)
    assert reply.result().text == "".join(PIECES)
    assert late.rid not in {asked.rid for asked in broker.of(wire.Decode)}
    broker.on[wire.Decode] = lambda peer, message: peer.reply(message.rid)
    broker.cut()
    assert late.result().text == "".join(PIECES), "the next broker is asked"


def test_a_session_that_is_refused(broker: ScriptedBroker) -> None:
    broker.on[wire.Hello] = lambda peer, message: peer.fail(
        b"", error_info(Code.RESOURCE_EXHAUSTED, "too_many_sessions")
    )
    with pytest.raises(Exception, match="too_many_sessions"):
        Conductor(broker.endpoint)


def test_asyncio_resumes_too(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            reply = conductor.agent("a").chat("x")
            got = [await anext(reply) for _ in PIECES]
            await asyncio.to_thread(broker.cut)
            await asyncio.to_thread(finish, broker, reply.rid, [" four"])
            got += [piece async for piece in reply]
            assert got == [*PIECES, " four"]

    asyncio.run(main())
