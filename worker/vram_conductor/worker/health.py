"""Tells a device that computes nothing any more from a job that cannot be computed. *Pure.*

A context of the device's driver that is poisoned answers every call with an error, for as long as
the process lives; only a new process helps. One job can fail by itself, as often as its owner
tries; so failures count only in a row, without any success on the device between, and only if
more than one job is among them.
"""

from __future__ import annotations

from collections.abc import Iterable

FAILURES_MAX = 3
"""Batches that fail in a row before the process is given up."""

JOBS_MIN = 2
"""Jobs that must be among them."""


class Health:
    """Counts failures.

    Attributes:
        broken: nothing can be expected of this process any more.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._jobs: set[int] = set()
        self.broken = False

    def good(self) -> None:
        """A batch was computed."""
        if self._failures:
            self._failures = 0
            self._jobs.clear()

    def failed(self, jobs: Iterable[int]) -> None:
        """A batch of these jobs (``Job.seq``) was not computed, for no reason of theirs that is
        known."""
        self._failures += 1
        self._jobs.update(jobs)
        self.broken = self._failures >= FAILURES_MAX and len(self._jobs) >= JOBS_MIN

    @property
    def failures(self) -> int:
        """How many in a row."""
        return self._failures
