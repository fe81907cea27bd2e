"""When to tell the broker what is where: on every change, and on a timer. *Pure.*"""

from __future__ import annotations

MIN_MS = 50
"""Changes that follow one another faster are told together."""

FRESH_NS = 250_000_000
"""A memory sample that is younger will do for an admission."""

PATIENCE_NS = 100_000_000
"""A report waits so long for who waits for a first token: a memory sample of a GPU takes
milliseconds."""

SHARE = 100
"""At most one part in so many of the time goes into reports on changes."""


class Reporter:
    """Paces RESIDENCY.

    Args:
        sample_ms: tell at least this often, with a fresh memory sample.
    """

    def __init__(self, sample_ms: int, min_ms: int = MIN_MS) -> None:
        self._sample_ns = sample_ms * 1_000_000
        self._min_ns = self._pause_ns = min(min_ms, sample_ms) * 1_000_000
        self._told_ns: int | None = None
        self._told_revision = -1
        self.seq = 0

    def took(self, elapsed_ns: int) -> None:
        """What making the last report took: with thousands of conversations it is no trifle."""
        self._pause_ns = min(max(self._min_ns, elapsed_ns * SHARE), self._sample_ns)

    def restart(self) -> None:
        """A new session: the broker knows nothing."""
        self._told_ns = None

    def hurry(self, now_ns: int) -> None:
        """Somebody is about to decide by the last sample: take another, unless it is fresh."""
        if self._told_ns is not None and now_ns - self._told_ns > FRESH_NS:
            self._told_ns = None

    def next_ns(self, revision: int, now_ns: int, *, urgent: bool = False) -> int:
        """When the next report is due. ``urgent``: somebody waits for something better."""
        if self._told_ns is None:
            return now_ns
        pause_ns = self._sample_ns if revision == self._told_revision else self._pause_ns
        return self._told_ns + pause_ns + (PATIENCE_NS if urgent else 0)

    def overdue(self, now_ns: int) -> bool:
        """Whether the next report can wait no longer, not even for moves that follow one another
        without a pause."""
        return self._told_ns is None or now_ns >= self._told_ns + self._sample_ns + PATIENCE_NS

    def due(self, revision: int, now_ns: int, *, urgent: bool = False) -> bool:
        """Whether to report now; True counts as done and advances ``seq``."""
        if now_ns < self.next_ns(revision, now_ns, urgent=urgent):
            return False
        self._told_ns, self._told_revision = now_ns, revision
        self.seq += 1
        return True
