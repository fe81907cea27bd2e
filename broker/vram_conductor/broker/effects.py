"""What the core wants done (*pure*). The shell carries effects out in the order of the list.

An ``Append`` that precedes a ``SendClient`` in the list must be in the journal file before the
message leaves: what a client has been told survives a crash of the broker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vram_conductor.broker.journal.records import Record
from vram_conductor.protocol.commands import ToWorker
from vram_conductor.protocol.messages import BrokerMessage


@dataclass(frozen=True, slots=True)
class SendClient:
    """Send to a client. If the connection is lost, ``ClientGone`` follows."""

    peer: bytes
    message: BrokerMessage


@dataclass(frozen=True, slots=True)
class SendWorker:
    """Send to a worker, with raw buffers. If the connection is lost, ``WorkerGone`` follows."""

    peer: bytes
    message: ToWorker
    raw: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Append:
    """Append to the journal."""

    record: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Write a log line. Fields never hold prompts, keys or token ids."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exit:
    """Flush the journal, close the sockets and end the process with ``code``."""

    code: int


Effect = SendClient | SendWorker | Append | Log | Exit
