"""What can happen to the broker (*pure*): the only inputs of the core.

``peer`` is the ROUTER's routing id of the connection, as bytes. Clients and workers have
separate sockets, so the same bytes may name one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vram_conductor.protocol.commands import FromWorker
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.keys import Quota, Role
from vram_conductor.protocol.messages import ClientMessage


@dataclass(frozen=True, slots=True)
class ClientMessageIn:
    """A well-formed message of a client.

    Attributes:
        principal: who the transport says the peer is.
        same_user_ipc: the peer is on this machine and has this user's rights, so it may name
            model files by path.
        role: what the peer may do, now.
        key: the public half of its key; empty where it needs none.
    """

    peer: bytes
    principal: str
    same_user_ipc: bool
    message: ClientMessage
    role: Role = "owner"
    key: str = ""


@dataclass(frozen=True, slots=True)
class ClientBad:
    """Undecodable frames of a client; ``error`` is what the codec raised, ``rid`` the request's
    id if that much could be read."""

    peer: bytes
    error: ConductorError
    rid: bytes = b""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The connection is lost, or the peer did not read and was given up. ``dead``: its process
    has ended, so nobody will come back for its jobs."""

    peer: bytes
    dead: bool = False


@dataclass(frozen=True, slots=True)
class ClientFlow:
    """The client is ``behind`` with reading: what it was sent waits here. Or it has caught up."""

    peer: bytes
    behind: bool


@dataclass(frozen=True, slots=True)
class WorkerMessageIn:
    """A well-formed message of a worker; ``raw`` are the buffers behind the map. ``devices``: those
    that its key is for; none named: any. ``key``: its public half; empty where it needs none."""

    peer: bytes
    message: FromWorker
    raw: list[bytes]
    devices: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class WorkerBad:
    """Undecodable frames of a worker."""

    peer: bytes
    error: ConductorError


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The connection is lost, or the worker did not read and was given up. ``dead``: its process
    has ended."""

    peer: bytes
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due at ``Core.next_deadline_ns()`` at the latest. Early ones are harmless."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Drain and end: an Exit effect follows within ``drain_ms``, and a little for what the workers
    have to say of what they cut off then. A second one exits at once."""

    drain_ms: int


@dataclass(frozen=True, slots=True)
class KeysChanged:
    """The keys that count from now on, each with its principal, and the quotas of principals.
    Sessions of other keys are over."""

    quotas: Mapping[str, Quota]
    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JournalTrouble:
    """The disk does not take the journal: ``why`` says so in STATUS. Empty: it does again."""

    why: str


Event = (
    ClientMessageIn
    | ClientBad
    | ClientGone
    | ClientFlow
    | WorkerMessageIn
    | WorkerBad
    | WorkerGone
    | Tick
    | Shutdown
    | KeysChanged
    | JournalTrouble
)
