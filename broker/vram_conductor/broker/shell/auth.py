"""Who a peer is (*pure*): the one place where a connection gets its principal.

Until keys exist there is one local principal. Over ipc the operating system has checked the
user: the sockets lie in a folder with mode 0700. Over loopback tcp any user of this machine may
connect, so such a peer gets the same principal but may not name files by path. Every other
address is refused before it is bound (``protocol.sockets``). With CURVE, the ZAP handler's
user id will be looked up here.
"""

from __future__ import annotations

from dataclasses import dataclass

LOCAL_PRINCIPAL = "local"
"""Part of every key in the journal: changing it orphans all agents."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the transport knows about a peer.

    Attributes:
        principal: owner of the agents that the peer registers.
        same_user_ipc: the peer has this process's rights on this machine.
    """

    principal: str
    same_user_ipc: bool


def identify(endpoint: str) -> Identity:
    """Identity of every peer of the socket that is bound to ``endpoint``."""
    return Identity(LOCAL_PRINCIPAL, same_user_ipc=endpoint.startswith("ipc://"))
