"""LEASE: device memory for a program outside, for a time. *Pure.*"""

from __future__ import annotations

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.check import check_name, check_range, check_rid


class Lease(Base, frozen=True, kw_only=True, tag="LEASE"):
    """Ask for device memory for a program outside, for a time. The same again renews it.

    Attributes:
        name: the lease's name, unique per principal.
        lease_bytes: how much.
        ttl_s: how long, from the answer on.
        device: on this device; None means where the most is free.
        park: agents may have to wait for it; False: only what no agent was promised.
        ephemeral: ends with the session, too.
        release: end it now; only ``name`` counts then.
        principal: end the lease of this one, for an admin; only ``name`` counts beside it. Sent
            without ``release``: a broker that does not know it sees no ``bytes`` and refuses.
    """

    rid: bytes
    name: str
    lease_bytes: int = msgspec.field(name="bytes", default=0)
    ttl_s: int = 60
    device: str | None = None
    park: bool = True
    ephemeral: bool = False
    release: bool = False
    principal: str | None = None

    @property
    def ends(self) -> bool:
        """Whether it ends a lease."""
        return self.release or self.principal is not None


def check_lease(message: Lease) -> None:
    """Names; bytes and ttl_s, unless it ends one."""
    check_rid(message.rid)
    check_name("name", message.name)
    if message.device is not None:
        check_name("device", message.device)
    if message.principal is not None:
        check_name("principal", message.principal)
    if not message.ends:
        check_range("bytes", message.lease_bytes, 1, limits.BYTES_MAX)
        check_range("ttl_s", message.ttl_s, 1, limits.LEASE_TTL_S_MAX)
