"""What a worker that leaves in order says in its log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from vram_conductor.protocol.values import ConversationKey


class ParkedStates(Protocol):
    """What stays for the next worker. ``kvstore.KVStore`` is it.

    Attributes:
        used_bytes: of all that is parked.
        spare_bytes: what parked states take beyond themselves.
    """

    @property
    def used_bytes(self) -> int: ...

    @property
    def spare_bytes(self) -> int: ...

    def keys(self) -> Sequence[ConversationKey]: ...


def farewell(states: ParkedStates) -> str:
    """The last line. *Pure.*"""
    count = len(states.keys())
    if not count:
        return "drained: nothing is parked; goodbye"
    what = "1 conversation is" if count == 1 else f"{count} conversations are"
    return f"drained: {what} parked ({states.used_bytes} bytes) for the next worker; goodbye"


def log_loss(log: logging.Logger, what: str, why: str, leaving: bool) -> None:
    """Say that the broker, or the way to it, is gone: of no matter to a worker that leaves."""
    if leaving:
        log.info("the broker is gone: %s; this worker is leaving anyway", why)
    else:
        log.warning(what, why)
