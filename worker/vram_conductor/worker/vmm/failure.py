"""What the preload library says when a call fails."""

from __future__ import annotations

import ctypes

from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, Internal

LOST = 3
"""``LOST`` of driver.h"""

_TEXT_BYTES = 256


class Failure(ctypes.Structure):
    """What went wrong, filled in by a call that returns anything but 0."""

    _fields_ = [
        ("need_bytes", ctypes.c_uint64),
        ("free_bytes", ctypes.c_uint64),
        ("text", ctypes.c_char * _TEXT_BYTES),
    ]


def text(failure: Failure) -> str:
    return bytes(failure.text).decode("utf-8", "replace")


def backup_failed(code: int, failure: Failure) -> ConductorError:
    if code == LOST:
        return FailedPrecondition("backup_gone", "the contents were given up in its sleep")
    return Internal(
        "backup_failed",
        f"pinned host memory: {text(failure)}",
        need_bytes=int(failure.need_bytes),
    )
