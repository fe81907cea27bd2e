"""Greetings of real sockets, and of everything else that may answer at a port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol import handshake
from vram_conductor.protocol.greeting import (
    CUTS_MAX,
    GREETING_BYTES,
    Handshakes,
    look,
    mechanism_of,
)
from vram_conductor.protocol.key_files import new_pair
from vram_conductor.protocol.keys import KeyFile

CUT = (0x0800, 32)
"""HANDSHAKE_FAILED_NO_DETAIL with EPIPE: the peer closed the connection."""

SHAKEN = (handshake.SUCCEEDED, 0)


def greeting(mechanism: bytes) -> bytes:
    head = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0")
    return head.ljust(GREETING_BYTES, b"\0")


@contextmanager
def peer(mechanism: str) -> Generator[int]:
    """The port of a ROUTER."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if mechanism == "CURVE":
            router.curve_server, router.curve_secretkey = True, new_pair().secret.encode()
        router.linger = 0
        yield router.bind_to_random_port("tcp://127.0.0.1")


@contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Generator[int]:
    """The port of a server that is no ZeroMQ."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def key_file() -> KeyFile:
    pair = new_pair()
    return KeyFile(
        name="a",
        principal="a",
        role="owner",
        public=pair.public,
        secret=pair.secret,
        broker=new_pair().public,
    )


# --- one greeting -------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["NULL", "CURVE"])
def test_a_socket_says_its_mechanism_to_whoever_says_little(mechanism: str) -> None:
    with peer(mechanism) as port:
        for _ in range(3):
            assert look("127.0.0.1", port, 20.0) == mechanism


def test_what_does_not_greet_is_nothing() -> None:
    def http(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(GREETING_BYTES))

    def half(connection: socket.socket) -> None:
        connection.sendall(greeting(b"CURVE")[:-1])

    answers: list[Callable[[socket.socket], None]] = [http, half, lambda connection: None]
    for answer in answers:
        with stranger(answer) as port:
            assert look("127.0.0.1", port, 20.0) == ""
    assert look("127.0.0.1", port, 20.0) == "", "nobody listens there any more"


def test_silence_and_trickles_take_no_longer_than_they_may() -> None:
    over = threading.Event()

    def silence(connection: socket.socket) -> None:
        over.wait(30)

    def trickle(connection: socket.socket) -> None:
        while not over.wait(0.02):
            connection.sendall(b"\xff")

    for answer in (silence, trickle):
        over.clear()
        with stranger(answer) as port:
            began_s = time.monotonic()
            assert look("127.0.0.1", port, 0.2) == ""
            took_s = time.monotonic() - began_s
            over.set()
        assert took_s < 10.0


@given(st.binary(max_size=80))
def test_any_bytes_are_a_greeting_or_none(data: bytes) -> None:
    assert isinstance(mechanism_of(data), str)
    if len(data) != GREETING_BYTES:
        assert mechanism_of(data) == ""


def test_a_greeting() -> None:
    assert mechanism_of(greeting(b"CURVE")) == "CURVE"
    assert mechanism_of(greeting(b"NULL")) == "NULL"
    assert mechanism_of(b"\xfe" + greeting(b"NULL")[1:]) == ""


# --- handshakes ---------------------------------------------------------------------------------


def cut(shakes: Handshakes) -> str:
    """One more handshake is cut, and the look that follows is over; the reason that is final."""
    failure = shakes.judge(*CUT)
    for thread in threading.enumerate():
        if thread.name == "greeting":
            thread.join(20)
    return failure.error.reason if failure is not None and failure.final else ""


@pytest.mark.parametrize(
    ("spoken", "keyed", "reason"),
    [("NULL", True, "key_unwanted"), ("CURVE", False, "key_required")],
)
def test_another_mechanism_is_known_at_the_second_cut(
    spoken: str, keyed: bool, reason: str
) -> None:
    with peer(spoken) as port:
        shakes = Handshakes(f"tcp://127.0.0.1:{port}", key_file() if keyed else None)
        assert cut(shakes) == ""
        assert cut(shakes) == reason


def test_a_wrong_key_of_the_broker_is_known_when_it_was_there_all_the_time() -> None:
    with peer("CURVE") as port:
        shakes = Handshakes(f"tcp://127.0.0.1:{port}", key_file())
        patient = Handshakes(f"tcp://127.0.0.1:{port}", key_file(), patient=True)
        assert [cut(shakes) for _ in range(CUTS_MAX)] == [""] * CUTS_MAX
        assert cut(shakes) == "wrong_broker_key"
        assert {cut(patient) for _ in range(CUTS_MAX + 3)} == {""}
        # One that succeeds in between is another story.
        shakes.judge(*SHAKEN)
        assert [cut(shakes) for _ in range(CUTS_MAX)] == [""] * CUTS_MAX


def test_a_broker_that_comes_and_goes_is_not_accused() -> None:
    with peer("CURVE") as port:
        shakes = Handshakes(f"tcp://127.0.0.1:{port}", key_file())
        assert cut(shakes) == ""
    assert {cut(shakes) for _ in range(CUTS_MAX + 3)} == {""}


def test_a_tunnel_whose_far_end_is_away_says_nothing_about_keys() -> None:
    with stranger(lambda connection: None) as port:
        shakes = Handshakes(f"tcp://127.0.0.1:{port}", key_file())
        for _ in range(CUTS_MAX + 3):
            assert shakes.judge(*CUT) is None
            assert cut(shakes) == ""


def test_over_ipc_nothing_is_looked_for() -> None:
    shakes = Handshakes("ipc:///nowhere/x.ipc", None)
    assert {cut(shakes) for _ in range(4)} == {""}
