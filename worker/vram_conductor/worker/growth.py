"""What the process takes for itself on the device, now and later. *Pure.*

``base`` is measured when nothing is loaded. After that it still grows: kernels are loaded at their
first use, in pieces of 2 MiB, and nobody frees them. A ledger that learns it from the next sample
has promised those bytes to somebody meanwhile. So they are promised from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

LATE_BYTES = 16 * MIB
"""Kept for what is loaded late: 8 to 14 MiB were seen on an H200, over thousands of turns of models
of two architectures and two types of KV."""

STEP_BYTES = 4 * MIB
"""Kept at any time, also when all of that is taken: the most that came at once."""


@dataclass(frozen=True)
class Growth:
    """In bytes.

    Attributes:
        measured_bytes: taken when nothing was loaded.
        taken_bytes: taken since.
    """

    measured_bytes: int
    taken_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """What it takes now."""
        return self.measured_bytes + self.taken_bytes

    @property
    def booked_bytes(self) -> int:
        """What must be promised: at least ``STEP_BYTES`` beyond what it takes."""
        return self.measured_bytes + max(LATE_BYTES, self.taken_bytes + STEP_BYTES)

    @property
    def reserve_bytes(self) -> int:
        """What is promised and not taken."""
        return self.booked_bytes - self.used_bytes

    def grown(self, size: int) -> Growth:
        """After it has taken so much more (given back: negative)."""
        return Growth(self.measured_bytes, self.taken_bytes + size)
