"""What a failed handshake means (*pure*): ZeroMQ tells it to the monitor, and to nobody else.

A refused key is an event of its own. So is a peer with another mechanism: one side has keys and the
other has none. A broker that cannot read what was encrypted for another's key closes the connection
without a word, which one that is just being stopped does, too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, Unauthenticated
from vram_conductor.protocol.keys import KeyFile

SUCCEEDED = 0x1000
DISCONNECTED = 0x0200
_NO_DETAIL, _PROTOCOL, _AUTH = 0x0800, 0x2000, 0x4000
EVENTS = SUCCEEDED | DISCONNECTED | _NO_DETAIL | _PROTOCOL | _AUTH
"""Monitor events of zmq_socket_monitor(3) that say how a connection fares."""

CUT = (_NO_DETAIL, _PROTOCOL)
"""The connection was closed in the midst of the handshake."""

_MECHANISM_MISMATCH = 0x11000002
_NEWS = struct.Struct("=HI")


class Failure(NamedTuple):
    """Why a handshake failed. ``final``: another attempt would end in the same way."""

    error: ConductorError
    final: bool


def read_news(frames: Sequence[bytes]) -> tuple[int, int]:
    """(event, value) of a monitor's message."""
    event, value = _NEWS.unpack_from(frames[0])
    return event, value


def judge(event: int, value: int, endpoint: str, key: KeyFile | None) -> Failure | None:
    """What a monitor's event means to who has ``key``; None: nothing for a person to know."""
    if event == _AUTH:
        return Failure(_refused_key(endpoint, key.public if key else ""), final=True)
    if event == _PROTOCOL and value == _MECHANISM_MISMATCH:
        return other_mechanism(endpoint, key)
    if event in CUT and key is not None:
        return Failure(_unread(endpoint, key), final=False)
    return None


def _refused_key(endpoint: str, public: str) -> ConductorError:
    """The broker's ZAP handler said no."""
    return Unauthenticated(
        "key_refused",
        f"the broker at {endpoint} does not take this key ({public}): it is unknown there, "
        "revoked, or for its other endpoint; on the broker's host: conductor keys list",
        endpoint=endpoint,
        public=public,
    )


def other_mechanism(endpoint: str, key: KeyFile | None) -> Failure:
    """One side has keys; ``key``: ours, if it is this one."""
    if key is None:
        error: ConductorError = Unauthenticated(
            "key_required",
            f"the broker at {endpoint} asks for a key; get a key file from whoever runs it "
            "(conductor keys new) and name it: --key, client.key or $VRAM_CONDUCTOR_CLIENT_KEY; "
            "for a worker: --key, worker.key or $VRAM_CONDUCTOR_WORKER_KEY",
            endpoint=endpoint,
        )
    else:
        error = FailedPrecondition(
            "key_unwanted",
            f"what answers at {endpoint} has no keys, so it cannot prove to be your broker; is it "
            "the right endpoint? Else take the key out of the configuration",
            endpoint=endpoint,
        )
    return Failure(error, final=True)


def _unread(endpoint: str, key: KeyFile) -> ConductorError:
    """The connection was closed in the midst of the handshake, again and again."""
    return Unauthenticated(
        "wrong_broker_key",
        f"what answers at {endpoint} has not the key that this key file names for the broker "
        f"({key.broker}), or the file is damaged: get a new one (conductor keys new), and "
        "look whether the endpoint is the right one",
        retryable=True,
        endpoint=endpoint,
        public=key.public,
        broker=key.broker,
    )
