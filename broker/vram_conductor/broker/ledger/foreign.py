"""What others use of a device, and how old that knowledge is. Pure."""

from __future__ import annotations

from vram_conductor.broker.ledger.claims import check_bytes


class ForeignGauge:
    """The last sample of others' use, and which part of it is leases in use.

    A sample does not tell who uses what. Growth since a lease is held is taken to be the
    lease's holder, up to the size of all held leases; what was there before was not. So a
    lease in use does not count twice, and a lease that nobody uses hides nothing: subtracting
    its whole size from the start would let an agent in on bytes that others hold. Where the
    sampler knows the holders it says so, and nothing is guessed.
    """

    __slots__ = ("_base_bytes", "_leased_bytes", "_taken_ns", "raw_bytes")

    def __init__(self) -> None:
        self.raw_bytes = 0
        self._taken_ns: int | None = None
        # Others' use that cannot be a lease's; None: not known yet.
        self._base_bytes: int | None = None
        # Leases' use as the sampler told it; None: it did not.
        self._leased_bytes: int | None = None

    def observe(
        self, raw_bytes: int, taken_ns: int, leases_bytes: int, leased_bytes: int | None = None
    ) -> bool:
        """Take a sample: ``raw_bytes`` used by others, leases included. ``leases_bytes``: size
        of all held leases now; ``leased_bytes``: how much of the sample is theirs, if known. False
        if the sample is older than the one held."""
        check_bytes("foreign_bytes", raw_bytes)
        if leased_bytes is not None:
            check_bytes("leased_bytes", leased_bytes)
        if self._taken_ns is not None and taken_ns < self._taken_ns:
            return False
        self._taken_ns, self.raw_bytes, self._leased_bytes = taken_ns, raw_bytes, leased_bytes
        if leased_bytes is not None:
            self._base_bytes = max(0, raw_bytes - leased_bytes)
        elif not leases_bytes:
            self._base_bytes = raw_bytes
        elif self._base_bytes is None:
            # Leases older than any sample (a restart): their holders are likely at work.
            self._base_bytes = max(0, raw_bytes - leases_bytes)
        else:
            self._base_bytes = min(self._base_bytes, raw_bytes)
        return True

    def forget(self) -> None:
        """The sampler is gone; its last word stays visible, but is as good as none."""
        self._taken_ns = None

    @property
    def taken_ns(self) -> int | None:
        """When the sample was taken; None: there is none."""
        return self._taken_ns

    def age_ns(self, now_ns: int) -> int | None:
        """Age of the sample; None: there is none."""
        return None if self._taken_ns is None else max(0, now_ns - self._taken_ns)

    def foreign_bytes(self, leases_bytes: int) -> int:
        """Others' use without leases in use. ``leases_bytes``: size of all held leases now."""
        in_use = self._leased_bytes
        if in_use is None:
            base = self.raw_bytes if self._base_bytes is None else self._base_bytes
            in_use = max(0, self.raw_bytes - base)
        return max(0, self.raw_bytes - min(in_use, leases_bytes))

    def leased(self, leases_bytes_before: int) -> None:
        """A lease is held from now on: all foreign use of this moment is somebody else's."""
        self._base_bytes = self.foreign_bytes(leases_bytes_before)
