"""What the device says against what the worker counts. *Pure.*

A process can take more than its owner allocated: kernels that are loaded late, a leak in a
library or a driver. A little becomes part of ``base``; much of it, where it lasts, is a reason to
start over, because "unloaded" with gigabytes still on the card helps nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

DRIFT_BYTES = 32 * MIB
"""So much in all is taken for kernels and the like, which stay until the process ends."""

RECYCLE_BYTES = 128 * MIB
"""More than this, where nobody can say what it is for, is worth a restart."""

RECYCLE_NS = 10_000_000_000
"""So long it must last, and nothing run."""

RECYCLE_AGE_NS = 300_000_000_000
"""A process that is younger stays: if a new one looks like that, another will, too."""

PINNED_SHARE = 256
"""The device keeps tables of pinned host memory, 8 bytes for 4096: taken twice over."""

SCRATCH_BELOW_BYTES, SCRATCH_ABOVE_BYTES = 8 * MIB, 64 * MIB
"""How far a measurement of scratch may be from its estimate to be believed."""


def settle_scratch(estimated_bytes: int, measured_bytes: int) -> int:
    """What a live context is counted with: the measurement, unless others came or went while it
    was taken."""
    if not estimated_bytes:
        return measured_bytes
    low = estimated_bytes - SCRATCH_BELOW_BYTES
    high = estimated_bytes + SCRATCH_ABOVE_BYTES
    return measured_bytes if max(0, low) <= measured_bytes <= high else estimated_bytes


@dataclass(frozen=True)
class Verdict:
    """About one sample.

    Attributes:
        drift_bytes: to be added to ``base``; negative where some of it went again.
        unexplained_bytes: beyond that; 0 or more.
        recycle: it has lasted, and nothing runs: the process should be replaced.
    """

    drift_bytes: int = 0
    unexplained_bytes: int = 0
    recycle: bool = False


class Unexplained:
    """Follows the samples of one process.

    Where NVML tells what the process uses, the rest is a subtraction. Where it does not, others'
    use and the rest look alike; but a rest appears when something is freed: the count falls, and
    what is in use falls by less. What appears like that is held against the process until it goes.
    """

    def __init__(
        self,
        drift_bytes: int = DRIFT_BYTES,
        recycle_bytes: int = RECYCLE_BYTES,
        recycle_ns: int = RECYCLE_NS,
        recycle_age_ns: int = RECYCLE_AGE_NS,
    ) -> None:
        self._drift_bytes = drift_bytes
        self._drifted_bytes = 0
        self._recycle_age_ns = recycle_age_ns
        self._first_ns: int | None = None
        self._recycle_bytes = recycle_bytes
        self._recycle_ns = recycle_ns
        self._since_ns: int | None = None
        self._before: tuple[int, int] | None = None
        self._suspect_bytes = 0

    def observe(
        self,
        counted_bytes: int,
        used_bytes: int,
        told_bytes: int | None,
        now_ns: int,
        *,
        idle: bool,
        pinned_bytes: int = 0,
    ) -> Verdict:
        """Take a sample, made between two moves.

        Args:
            counted_bytes: all lines of this worker, base included.
            used_bytes: in use on the device, by everybody.
            told_bytes: what NVML says this process uses; None where it does not tell.
            idle: no job runs or waits.
            pinned_bytes: host memory that the device can reach.
        """
        if self._first_ns is None:
            self._first_ns = now_ns
        drift = 0
        if told_bytes is None:
            rest = self._suspect(counted_bytes, used_bytes)
        else:
            rest = max(0, told_bytes - counted_bytes)
            allowed = self._drift_bytes + pinned_bytes // PINNED_SHARE
            drift = min(rest, max(0, allowed - self._drifted_bytes))
            rest -= drift
            if told_bytes < counted_bytes:
                drift = -min(counted_bytes - told_bytes, self._drifted_bytes)
            self._drifted_bytes += drift
        if rest <= self._recycle_bytes or not idle:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = now_ns
        lasted = self._since_ns is not None and now_ns - self._since_ns >= self._recycle_ns
        lasted = lasted and now_ns - self._first_ns >= self._recycle_age_ns
        return Verdict(drift, rest, lasted)

    def _suspect(self, counted_bytes: int, used_bytes: int) -> int:
        beside = used_bytes - counted_bytes
        if self._before is not None:
            counted_before, beside_before = self._before
            if counted_bytes < counted_before:
                freed = counted_before - counted_bytes
                self._suspect_bytes += min(max(0, beside - beside_before), freed)
            elif beside < beside_before:
                self._suspect_bytes -= min(self._suspect_bytes, beside_before - beside)
        self._before = counted_bytes, beside
        self._suspect_bytes = max(0, min(self._suspect_bytes, beside))
        return self._suspect_bytes
