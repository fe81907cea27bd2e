"""A lease, for blocking callers: device memory that this program may use for a time."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from vram_conductor.client.renewal import Renewal
from vram_conductor.protocol.errors import ConductorError, NotFound
from vram_conductor.protocol.status import LeaseStatus

if TYPE_CHECKING:
    from vram_conductor.client.sync import Conductor


class Lease:
    """Made by ``Conductor.lease``; it is held when that returns. Thread-safe.

    In a ``with`` block it is renewed in the background and released at the end. Without one it
    ends by itself after ``ttl_s``, unless :meth:`renew` is called.

    Attributes:
        info: what the broker said last: device, bytes, state.
        error: why the last renewal failed; None: it did not. The lease then lasts until its end
            at most: stop using the memory, or :meth:`renew`.

    >>> with Conductor() as conductor, conductor.lease("train", "3 GB", ttl_s=600) as lease:
    ...     print(f"now allocate {lease.info.bytes} bytes on {lease.info.device}")
    now allocate 3000000000 bytes on cpu
    """

    def __init__(self, conductor: Conductor, renewal: Renewal, info: LeaseStatus) -> None:
        self._conductor = conductor
        self._renewal = renewal
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.info: LeaseStatus = info
        self.error: ConductorError | None = None

    def __repr__(self) -> str:
        return f"Lease({self.name!r}, {self.info.bytes} bytes of {self.info.device})"

    @property
    def name(self) -> str:
        return self.info.name

    def renew(self) -> LeaseStatus:
        """From now on it lasts its ``ttl_s`` again. Where it had ended, it is asked for anew.

        Raises:
            LedgerDeny: it had ended, and there is no room now.
            DeadlineExceeded: ``lease_timeout``: so, and agents did not make room in time.
            Unavailable: nobody answers.
        """
        try:
            ask = self._conductor._lease  # pyright: ignore[reportPrivateUsage] - a part of it
            self.info = ask(self._renewal.message(), self._renewal.answer_ms)
        except ConductorError as error:
            self.error = error
            raise
        self.error = None
        return self.info

    def release(self) -> None:
        """End it now; agents get the memory back. Idempotent."""
        self._end_renewing()
        with contextlib.suppress(NotFound):
            self._conductor.release_lease(self.name)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._keep, name=f"lease {self.name}", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Without a broker there is nothing to end: it goes with its time.
        with contextlib.suppress(ConductorError):
            self.release()

    def _keep(self) -> None:
        while not self._stop.wait(self._renewal.pause_s(failed=self.error is not None)):
            with contextlib.suppress(ConductorError):
                self.renew()

    def _end_renewing(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
