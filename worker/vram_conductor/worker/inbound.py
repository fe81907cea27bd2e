"""What the IO thread hands to the engine. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.commands import ToWorker
from vram_conductor.protocol.errors import ErrorInfo


@dataclass(frozen=True)
class Arrived:
    """A command, or W_WELCOME, for the engine."""

    message: ToWorker
    raw: list[bytes]


@dataclass(frozen=True)
class SessionLost:
    """Nothing that is under way will be heard any more."""


@dataclass(frozen=True)
class ReadyWanted:
    """The broker waits for READY: send one."""


@dataclass(frozen=True)
class Refused:
    """The broker does not want this worker."""

    error: ErrorInfo


Inbound = Arrived | SessionLost | ReadyWanted | Refused
