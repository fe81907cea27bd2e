"""The size of one thing as far as it is known: estimates first, then a measurement. Pure."""

from __future__ import annotations

from vram_conductor.broker.ledger.ordered import Multiset

Mark = tuple[int | None, bool]


class Figure:
    """A size in bytes.

    A measurement is the truth. Until there is one, the largest estimate counts: those of open
    reservations (which may still be withdrawn) and the settled one.
    """

    __slots__ = ("_open", "measured", "settled_bytes")

    def __init__(self) -> None:
        self._open: Multiset[int] = Multiset()
        self.settled_bytes: int | None = None
        self.measured = False

    @property
    def bytes(self) -> int:
        settled = self.settled_bytes or 0
        if self.measured or not self._open:
            return settled
        return max(settled, self._open.top)

    def bytes_with(self, estimate: int) -> int:
        """The size if this estimate were opened."""
        return self.bytes if self.measured else max(self.bytes, estimate)

    @property
    def known(self) -> bool:
        """Whether anybody has told a size."""
        return self.settled_bytes is not None or bool(self._open)

    @property
    def is_open(self) -> bool:
        """Whether a reservation in progress has told a size."""
        return bool(self._open)

    def open(self, estimate: int) -> None:
        """A reservation tells its estimate."""
        self._open.add(estimate)

    def withdraw(self, estimate: int) -> None:
        """The reservation is rolled back."""
        self._open.remove(estimate)

    def settle(self, estimate: int) -> None:
        """The reservation is committed."""
        self._open.remove(estimate)
        self.remember(estimate)

    def remember(self, estimate: int) -> None:
        """Keep an estimate that no reservation stands for any more."""
        if not self.measured:
            self.settled_bytes = max(self.settled_bytes or 0, estimate)

    def measure(self, size: int) -> None:
        self.settled_bytes, self.measured = size, True

    def limit(self, size: int) -> None:
        """Lower a settled estimate: something that contains this was measured at ``size``."""
        if not self.measured and self.settled_bytes is not None:
            self.settled_bytes = min(self.settled_bytes, size)

    def mark(self) -> Mark:
        """What :meth:`reset` needs to undo a measurement."""
        return self.settled_bytes, self.measured

    def reset(self, mark: Mark) -> None:
        self.settled_bytes, self.measured = mark
