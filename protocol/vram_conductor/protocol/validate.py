"""Checks of client requests against the limits. *Pure.*

One function per message type, and ``check`` for any. A value that is wrong under any limit is
INVALID_ARGUMENT; one that is merely above a limit is OUT_OF_RANGE ``limit_exceeded``. ``details``
holds ``field``, ``value`` (for texts: their length) and ``limit`` or the range. What needs the
model (token ids against the vocabulary, prompt against n_ctx) is checked where it is known.
"""

from __future__ import annotations

from vram_conductor.protocol.messages import (
    Cancel,
    ClientMessage,
    Credit,
    Decode,
    Hello,
    Register,
    Reset,
    Resume,
    Unregister,
)
from vram_conductor.protocol.values import Sampling


def check(message: ClientMessage) -> None:
    """Check any client message.

    Raises:
        InvalidArgument: ``bad_rid``, ``bad_name``, ``bad_value``, ``bad_input``, ``empty_input``.
        OutOfRange: ``limit_exceeded``.
        Unimplemented: ``unsupported_version``, ``unsupported_overflow``.
    """
    raise NotImplementedError


def check_hello(message: Hello) -> None:
    raise NotImplementedError


def check_register(message: Register) -> None:
    raise NotImplementedError


def check_unregister(message: Unregister) -> None:
    raise NotImplementedError


def check_decode(message: Decode) -> None:
    raise NotImplementedError


def check_credit(message: Credit) -> None:
    raise NotImplementedError


def check_cancel(message: Cancel) -> None:
    raise NotImplementedError


def check_resume(message: Resume) -> None:
    raise NotImplementedError


def check_reset(message: Reset) -> None:
    raise NotImplementedError


def check_sampling(sampling: Sampling) -> None:
    """Ranges of :class:`Sampling`; NaN and infinities are refused."""
    raise NotImplementedError
