"""Page-locked host memory: who can lock it, how much may be, how much is.

A device copies to and from pinned memory several times as fast as pageable memory. Pinning is
never needed: where it is refused, the same copies run slower.

Source of the rule that shapes all callers (CUDA driver API, ``cuMemcpy*``): a copy must touch
memory that is registered as a whole, or not registered at all; a mixture is an invalid value, on
which llama.cpp aborts.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Protocol

from vram_conductor.protocol.errors import ConductorError

log = logging.getLogger(__name__)

PIECE_BYTES = 16 * 1024 * 1024
"""Pinned in one call where copies may span pieces: at 2.8 GB/s, 6 ms in which the driver may keep
other calls waiting."""

RESERVE_BYTES = 32 * 1024 * 1024
"""What a conversation's memory grows by when it is pinned, at most as much as its state has, or a
quarter of that where this is more."""


def with_reserve(state_bytes: int) -> tuple[int, int]:
    """Less memory than the first should become the second: the reserve is renewed when half of
    it is used, not at every turn, since each time is one more piece, or all of it pinned anew.
    *Pure.*"""
    more = max(state_bytes // 4, min(state_bytes, RESERVE_BYTES))
    return state_bytes + more // 2, state_bytes + more


class Pinner(Protocol):
    """Locks pages for one device. Thread-safe.

    Attributes:
        spans: whether one copy may reach over several neighbouring ranges.
    """

    spans: bool

    def pin(self, address: int, size: int) -> None:
        """Lock ``size`` bytes at ``address`` (both multiples of the page, mapped, backed, and
        touching no range that is pinned).

        Raises:
            ResourceExhausted: ``pin_refused``: nothing has changed.
        """

    def unpin(self, address: int) -> None:
        """Undo the :meth:`pin` of exactly this address. Raises Internal ``unpin_failed``."""

    def close(self) -> None:
        """Let go of the device; nothing may be pinned any more. Idempotent."""


class NullPinner:
    """A device that has no use for pinned memory."""

    spans = True

    def pin(self, address: int, size: int) -> None:
        raise AssertionError("pinning is switched off")

    def unpin(self, address: int) -> None:
        raise AssertionError("pinning is switched off")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class PinFigures:
    """What is pinned.

    Attributes:
        pinned_bytes, cap_bytes: now, and at most; the cap is 0 where nothing may be pinned.
        note: why less than the configured cap is pinned; empty while there is no reason.
    """

    pinned_bytes: int
    cap_bytes: int
    note: str = ""


class Pinning:
    """One pinner, and the account of what it has locked. Thread-safe."""

    def __init__(self, cap_bytes: int = 0, pinner: Pinner | None = None) -> None:
        self._lock = threading.Lock()
        self._cap_bytes = cap_bytes
        self._pinner: Pinner = pinner or NullPinner()
        self._active = pinner is not None and cap_bytes > 0
        self._pinned: dict[int, int] = {}
        self._pinned_bytes = 0
        self._note = ""

    def use(self, pinner: Pinner) -> None:
        """Pin from now on: the device has become usable."""
        with self._lock:
            assert not self._pinned
            self._pinner, self._active = pinner, self._cap_bytes > 0

    def give_up(self, why: str) -> None:
        """There is no pinner, which is worth one warning."""
        log.warning("parked states stay in pageable memory, copies are slower: %s", why)
        with self._lock:
            self._cap_bytes, self._note, self._active = 0, why, False

    @property
    def active(self) -> bool:
        """Whether it is worth trying."""
        return self._active

    @property
    def spans(self) -> bool:
        """See :class:`Pinner`."""
        return self._pinner.spans

    def figures(self) -> PinFigures:
        """What is pinned now."""
        with self._lock:
            return PinFigures(self._pinned_bytes, self._cap_bytes, self._note)

    def note(self) -> str:
        """A clause for people; empty where there is no device to pin for."""
        if self._active:
            return "parked states are pinned"
        figures = self.figures()
        return f"parked states are pageable ({figures.note})" if figures.note else ""

    def pin(self, address: int, size: int) -> bool:
        """Lock a range, see :meth:`Pinner.pin`; False where the cap or the system forbids it.

        A refusal becomes the cap, so that the system is not asked in vain for every state.
        """
        with self._lock:
            if not self._active or self._pinned_bytes + size > self._cap_bytes:
                return False
            self._pinned_bytes += size
        try:
            self._pinner.pin(address, size)
        except ConductorError as error:
            with self._lock:
                self._pinned_bytes -= size
                self._cap_bytes = min(self._cap_bytes, self._pinned_bytes)
                first, self._note = not self._note, error.info.message
            if first:
                log.warning("no more than %d bytes are pinned: %s", self._cap_bytes, self._note)
            return False
        with self._lock:
            self._pinned[address] = size
        return True

    def unpin(self, address: int) -> None:
        """Unlock a range that :meth:`pin` locked. Raises Internal ``unpin_failed``: it still is."""
        self._pinner.unpin(address)
        with self._lock:
            self._pinned_bytes -= self._pinned.pop(address)

    def close(self) -> None:
        """Pin no more and let go of the device. Idempotent."""
        self._active = False
        self._pinner.close()
