"""What the client's core wants done or made known (*pure*). Shells act on it in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import Usage


@dataclass(slots=True)
class Connect:
    """Close the socket, if there is one, and open a fresh one: nothing that was on its way to or
    from the old one counts any more. What to send is in ``ClientCore.outgoing``."""


@dataclass(slots=True)
class Warn:
    """Something odd that nobody waits for: write a log line."""

    text: str


@dataclass(slots=True)
class Opened:
    """The session stands."""

    session: str
    broker_epoch: int


@dataclass(slots=True)
class Down:
    """No session, and the core has stopped trying; the next request tries again."""

    error: ConductorError


@dataclass(slots=True)
class Queued:
    """The broker took a job in."""

    rid: bytes
    job: int
    position: int
    est_ms: int | None


@dataclass(slots=True)
class News:
    """PROGRESS of a slow request: ``stage`` is a stable word, ``done`` of ``total`` its unit."""

    rid: bytes
    stage: str
    done: int
    total: int
    note: str


@dataclass(slots=True)
class Output:
    """The next piece of a reply, each exactly once and in order."""

    rid: bytes
    text: str
    ids: tuple[int, ...]


@dataclass(slots=True)
class Answered:
    """A request other than DECODE succeeded. Terminal."""

    rid: bytes
    body: dict[str, Any]


@dataclass(slots=True)
class Finished:
    """A job ended and all of its output was given out. Terminal."""

    rid: bytes
    usage: Usage


@dataclass(slots=True)
class Failed:
    """A request failed. Terminal."""

    rid: bytes
    error: ConductorError


RequestEffect = Queued | News | Output | Answered | Finished | Failed
Effect = Connect | Warn | Opened | Down | RequestEffect
