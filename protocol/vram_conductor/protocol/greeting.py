"""Failed handshakes, where the monitor alone does not know why.

Two ends with different mechanisms both close the connection as soon as they see the other's
greeting; whichever comes second learns only that the handshake was cut. So does who has the wrong
key of the broker, and who meets a broker that is just being stopped. The greeting tells them apart:
it is read once more, on a connection of its own that says no more than it must to be answered (ZMTP
3.1, https://rfc.zeromq.org/spec/37/: a peer sends all of its greeting once it has signature and
version of the other's).
"""

from __future__ import annotations

import socket
import threading
import time

from vram_conductor.protocol import handshake
from vram_conductor.protocol.endpoints import Tcp, parse_endpoint
from vram_conductor.protocol.handshake import Failure
from vram_conductor.protocol.keys import KeyFile

GREETING_BYTES = 64
_SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
_MECHANISM = slice(12, 32)

LOOK_S = 1.0
"""How long a greeting may take; then it is not known, and looked for again."""

CUTS_MAX = 2
"""Handshakes that were cut although the peer greeted as it should: by then it is the key."""


def mechanism_of(greeting: bytes) -> str:
    """The mechanism of a whole greeting, for example ``CURVE``; empty: it is none. *Pure.*"""
    if len(greeting) != GREETING_BYTES or greeting[0] != 0xFF or not greeting[9] & 1:
        return ""
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def look(host: str, port: int, patience_s: float = LOOK_S) -> str:
    """The mechanism that is spoken there; empty: nobody greets within ``patience_s`` seconds."""
    give_up_s = time.monotonic() + patience_s
    greeting = b""
    try:
        with socket.create_connection((host, port), patience_s) as peer:
            peer.sendall(_SIGNATURE_AND_VERSION)
            while len(greeting) < GREETING_BYTES:
                peer.settimeout(max(0.001, give_up_s - time.monotonic()))
                part = peer.recv(GREETING_BYTES - len(greeting))
                if not part:
                    break
                greeting += part
    except OSError:
        return ""
    return mechanism_of(greeting)


class Handshakes:
    """What becomes of one endpoint's handshakes. Not thread-safe.

    Args:
        endpoint: the broker's.
        key: what this side proves itself with, over tcp.
        patient: a wrong key of the broker is never final: somebody may correct it.
    """

    def __init__(self, endpoint: str, key: KeyFile | None, *, patient: bool = False) -> None:
        where = parse_endpoint(endpoint)
        self._endpoint = endpoint
        self._where = where if isinstance(where, Tcp) else None
        self._key = key
        self._patient = patient
        self._looking: threading.Thread | None = None
        self._mechanism = ""
        self._cuts = 0

    def judge(self, event: int, value: int) -> Failure | None:
        """What a monitor's event means; None: nothing for a person to know."""
        if event == handshake.SUCCEEDED:
            self._cuts, self._mechanism = 0, ""
            return None
        failure = handshake.judge(event, value, self._endpoint, self._key)
        if event not in handshake.CUT or (failure is not None and failure.final):
            return failure
        if self._looking is not None and self._looking.is_alive():
            return failure
        mechanism, self._mechanism = self._mechanism, ""
        self._look()
        if mechanism != ("NULL" if self._key is None else "CURVE"):
            self._cuts = 0
            other = mechanism == ("CURVE" if self._key is None else "NULL")
            # Where nobody greets there is no broker, only a tunnel or a proxy: no key is wrong.
            return handshake.other_mechanism(self._endpoint, self._key) if other else None
        self._cuts += 1
        if failure is None or self._patient or self._cuts < CUTS_MAX:
            return failure
        return Failure(failure.error, final=True)

    def _look(self) -> None:
        """Begin to; the answer is there when the next handshake fails."""
        where = self._where
        if where is None:
            return

        def note() -> None:
            self._mechanism = look(where.host, where.port)

        self._looking = threading.Thread(target=note, name="greeting", daemon=True)
        self._looking.start()
