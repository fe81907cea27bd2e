"""How a wake shares the way to the device with others who copy. *Pure.*

Copies of one direction go one after the other. Large pieces come closer to the rate of the bus;
behind small ones others wait for less.
"""

from __future__ import annotations

from collections.abc import Mapping

from vram_conductor.protocol.errors import InvalidArgument

PIECE_VARIABLE = "VRAM_CONDUCTOR_VMM_PIECE"
"""In bytes: what a wake copies at a time, 0: everything at once. For experiments."""

PIECE_BYTES, GIVE_WAY_NS = 16 << 20, 3_000_000
"""``PIECE`` and ``GIVE_WAY_NS`` of backup.c"""

LEAST_PIECE_BYTES = 64 << 10
"""Every piece costs some microseconds: smaller ones would take longer to order than to copy."""


def piece_bytes(env: Mapping[str, str]) -> int:
    """What :data:`PIECE_VARIABLE` says, or the default. *Pure.*

    Raises:
        InvalidArgument: ``bad_config``: no number of bytes, or too few.
    """
    given = env.get(PIECE_VARIABLE, "")
    if not given:
        return PIECE_BYTES
    size = int(given) if given.isascii() and given.isdigit() and len(given) < 16 else -1
    if size == 0 or size >= LEAST_PIECE_BYTES:
        return size
    raise InvalidArgument(
        "bad_config",
        f"{PIECE_VARIABLE}={given}: what a wake copies at a time, in bytes, is 0 (everything at "
        f"once) or at least {LEAST_PIECE_BYTES}; without it, it is {PIECE_BYTES}",
        key=PIECE_VARIABLE,
    )
