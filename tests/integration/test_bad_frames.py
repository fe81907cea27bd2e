"""Bytes that no honest client sends: refused with a reason, and nobody else notices."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgpack
import pytest
from broker_process import RawClient
from scene import BYSTANDER, HISTORY, Scene, until

from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.limits import FRAME_BYTES_MAX, PREAMBLE, PROTOCOL_MAJOR
from vram_conductor.protocol.messages import (
    Decode,
    Error,
    Hello,
    Ok,
    Ping,
    Register,
    Status,
    Welcome,
)
from vram_conductor.protocol.values import Usage

NESTED = b"\x91" * 200_000
GIANT = msgpack.packb({"t": "STATUS", "rid": b"r" * 16, "junk": [0] * 4_000_000})
ENDLESS = b"\xdf\xff\xff\xff\xff"  # a map that announces 4 billion pairs


def said(client: RawClient, frames: Sequence[bytes]) -> ErrorInfo:
    client.socket.send_multipart(list(frames))
    return client.expect(Error).error


@pytest.mark.parametrize(
    ("frames", "code", "reason"),
    [
        ([b"GET / HTTP/1.1\r\n\r\n"], Code.INVALID_ARGUMENT, "bad_frames"),
        ([PREAMBLE], Code.INVALID_ARGUMENT, "bad_frames"),
        ([PREAMBLE, b"", b""], Code.INVALID_ARGUMENT, "bad_message"),
        ([PREAMBLE, b"\x80", b"raw", b"raw", b"raw"], Code.INVALID_ARGUMENT, "bad_frames"),
        ([b"VMD\x01", b"\x80"], Code.INVALID_ARGUMENT, "bad_preamble"),
        (
            [b"VMC" + bytes([PROTOCOL_MAJOR + 1]), b"\x80"],
            Code.UNIMPLEMENTED,
            "unsupported_version",
        ),
        ([PREAMBLE, b"\xc1"], Code.INVALID_ARGUMENT, "bad_message"),
        ([PREAMBLE, b"\x93\x01\x02\x03"], Code.INVALID_ARGUMENT, "bad_message"),
        ([PREAMBLE, NESTED], Code.INVALID_ARGUMENT, "bad_message"),
        ([PREAMBLE, ENDLESS], Code.INVALID_ARGUMENT, "bad_message"),
        ([PREAMBLE, msgpack.packb({"t": "FORMAT_DISK"})], Code.INVALID_ARGUMENT, "bad_message"),
        (
            [PREAMBLE, msgpack.packb({"t": "DONE", "rid": b""})],
            Code.INVALID_ARGUMENT,
            "bad_message",
        ),
        ([PREAMBLE, msgpack.packb({"rid": b"r" * 16})], Code.INVALID_ARGUMENT, "bad_message"),
        ([PREAMBLE, msgpack.packb({"t": "STATUS", "rid": b"x"})], Code.INVALID_ARGUMENT, "bad_rid"),
        (
            [PREAMBLE, msgpack.packb({"t": "STATUS", "rid": b"r" * 16}), b"undeclared"],
            Code.INVALID_ARGUMENT,
            "bad_frames",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nonsense_is_refused_with_a_reason(
    scene: Scene, frames: list[bytes], code: Code, reason: str
) -> None:
    client = scene.raw()
    with scene.undisturbed():
        error = said(client, frames)
        assert (error.code, error.reason, error.retryable) == (code, reason, False)
        assert error.message
        # The session of the one who sent it goes on, too.
        client.ping()


def test_a_giant_map_of_junk_is_read_past(scene: Scene) -> None:
    assert len(GIANT) < FRAME_BYTES_MAX
    client = scene.raw()
    with scene.undisturbed():
        client.socket.send_multipart([PREAMBLE, GIANT])
        client.expect(Ok, b"r" * 16)


def test_a_frame_beyond_the_limit_costs_its_sender_the_connection(scene: Scene) -> None:
    client = scene.raw()
    with scene.undisturbed():
        client.socket.send_multipart([PREAMBLE, bytes(FRAME_BYTES_MAX + 1)])

        def answered() -> bool:
            """What is sent while libzmq cuts the connection and makes a new one is lost."""
            client.send(Ping(n=1))
            return bool(client.socket.poll(100))

        until(answered, "there is a new connection")
        assert client.expect(Error).error.reason == "no_session"
        client.send(Hello(v=(1, 0)))
        while not isinstance(client.receive(), Welcome):
            pass  # each of the pings is refused
        client.ping()


def test_bytes_that_are_no_zeromq_at_all(scene: Scene) -> None:
    with scene.undisturbed(), socket.socket(socket.AF_UNIX) as plain:
        plain.connect(scene.stage.endpoint.removeprefix("ipc://"))
        plain.sendall(b"\x16\x03\x01" + bytes(4096))


def test_without_hello_nothing_is_done(scene: Scene) -> None:
    client = scene.raw(hello=False)
    with scene.undisturbed():
        for message in (
            Status(rid=new_rid()),
            Register(rid=new_rid(), agent="x", model="smollm2-135m"),
            Decode(rid=new_rid(), agent=BYSTANDER, tokens=HISTORY),
        ):
            client.send(message)
            error = client.expect(Error)
            assert error.rid == message.rid
            assert error.error.code == Code.FAILED_PRECONDITION
            assert error.error.reason == "no_session"
            assert "HELLO" in error.error.message
        client.hello()
        client.ping()


def test_a_rid_that_was_used_for_something_else(scene: Scene) -> None:
    client = scene.raw()
    with scene.undisturbed():
        rid = new_rid()
        job = Decode(
            rid=rid, agent=BYSTANDER, conversation="rid", tokens=HISTORY, max_tokens=4, detach=True
        )
        client.send(job)
        pieces, usage = client.result(rid)
        assert isinstance(usage, Usage)
        assert usage.generated_tokens == 4
        assert pieces
        # The same once more is not a second job: what it said is said again.
        client.send(job)
        assert client.result(rid) == (pieces, usage)
        client.send(Decode(rid=rid, agent=BYSTANDER, conversation="rid", tokens=HISTORY))
        error = client.expect(Error)
        assert (error.rid, error.error.code) == (rid, Code.ALREADY_EXISTS)
        assert "rid" in error.error.message
        client.ping()
    talks = {talk.conversation: talk for talk in scene.agent(BYSTANDER).conversations}
    assert talks["rid"].version == 1
    scene.conductor.reset(BYSTANDER, "rid")
