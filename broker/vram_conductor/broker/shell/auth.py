"""Who a peer is (*pure*): the one place where a connection gets its principal.

Over ipc the operating system has checked the user: the sockets lie in a folder with mode 0700. Over
loopback tcp without keys any user of this machine may connect, so such a peer gets the same
principal but may not name files by path. With keys, the peer's is the one that the ZAP handler has
seen it prove, and who it stands for is looked up in the list of keys. Every other address is
refused before it is bound (``protocol.sockets``).
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.keys import Key, Role

LOCAL_PRINCIPAL = "local"
"""Part of every key in the journal: changing it orphans all agents."""

CLIENTS, WORKERS = "clients", "workers"
"""ZAP domains of the two ROUTERs."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the transport knows about a peer.

    Attributes:
        principal: owner of the agents that the peer registers.
        same_user_ipc: the peer has this process's rights on this machine.
        role: what it may do.
        key: the public half of its key; empty where there are none.
    """

    principal: str
    same_user_ipc: bool
    role: Role = "owner"
    key: str = ""


def identify(endpoint: str) -> Identity:
    """Identity of every peer of the socket that is bound to ``endpoint`` without keys."""
    ipc = endpoint.startswith("ipc://")
    return Identity(LOCAL_PRINCIPAL, same_user_ipc=ipc, role="admin" if ipc else "owner")


def identity_of(key: Key) -> Identity:
    """Identity of whoever has this key."""
    return Identity(key.principal, same_user_ipc=False, role=key.role, key=key.public)


def may_enter(key: Key | None, domain: str) -> bool:
    """Whether a key opens this ROUTER: a worker's that of the workers only, a client's that of
    the clients only."""
    return key is not None and (key.role == "worker") == (domain == WORKERS)
