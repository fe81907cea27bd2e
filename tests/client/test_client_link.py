"""The link by hand, without a thread: what the socket holds, and in which order it counts."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from vram_conductor.client.core import ClientCore
from vram_conductor.client.effects import Finished, Output, RequestEffect
from vram_conductor.client.link import Link
from vram_conductor.client.session import Phase, Timing
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol import sockets
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.codec import BROKER_TO_CLIENT, CLIENT_TO_BROKER
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.values import Usage

PIECES = 500
"""More than the link reads in a row."""

PATIENCE_MS = 20_000


def test_a_broker_that_leaves_is_heard_to_the_end(short_tmp: Path) -> None:
    """It says its last words and closes; the client reads them only after it has noticed that."""
    endpoint = f"ipc://{short_tmp}/c.ipc"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = sockets.listen(context, endpoint)
    link = Link(ClientCore(endpoint, "test", Timing()), endpoint)
    heard: list[RequestEffect] = []
    decode = wire.Decode(rid=new_rid(), agent="a", tokens=[1])
    link.sinks[decode.rid] = heard.append
    link.perform(link.core.decode(decode, PATIENCE_MS, time.monotonic_ns()))
    try:
        link.pump()
        assert listener.socket.poll(PATIENCE_MS)
        hello = sockets.receive(listener.socket)
        assert hello is not None
        assert isinstance(CLIENT_TO_BROKER.decode(hello.frames)[0], wire.Hello)
        words: list[Base] = [
            wire.Welcome(
                v=(1, 0), session="s", broker_epoch=1, principal="local", heartbeat_ms=2000
            )
        ]
        sockets.send(listener.socket, BROKER_TO_CLIENT.encode(words[0]), hello.peer)
        while not listener.socket.poll(1):
            link.pump()
        rid = decode.rid
        words = [wire.Accepted(rid=rid, job=1, position=0)]
        words += [wire.Tokens(rid=rid, seq=seq, text="x") for seq in range(PIECES)]
        words += [wire.Done(rid=rid, seq=PIECES, usage=Usage(generated_tokens=PIECES))]
        for word in words:
            sockets.send(listener.socket, BROKER_TO_CLIENT.encode(word), hello.peer)
        listener.close()
        _, monitor = link.pollable
        assert monitor.poll(PATIENCE_MS), "the connection is gone"
        while link.pump():
            pass
        assert sum(isinstance(effect, Output) for effect in heard) == PIECES
        assert isinstance(heard[-1], Finished)
        assert link.core.phase is Phase.DIALLING, "and then it looks for a new one"
    finally:
        link.close()
        context.destroy(linger=0)
