"""What an operator can do with a device's worker, in the blocking and the asyncio client."""

from __future__ import annotations

from vram_conductor.client.answers import typed
from vram_conductor.client.calling import AsyncCalling, Calling, OnProgress
from vram_conductor.client.requests import checked_timeout_ms
from vram_conductor.protocol.drain import DrainDevice, DrainReceipt, check_drain
from vram_conductor.protocol.ids import new_rid

DRAIN_TIMEOUT_S = 300.0
"""Beyond what runs: everything is parked, and a large model takes a while to be let go."""


class Draining(Calling):
    """Part of ``Conductor``."""

    def drain(
        self,
        device: str,
        *,
        worker_epoch: int | None = None,
        drain_s: float | None = None,
        hold_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> DrainReceipt:
        """Let the worker of a device finish what runs, park everything and leave; returns when it
        has. Jobs and registrations wait for its successor, and nothing is lost.

        Args:
            device: its id.
            worker_epoch: of the worker that is meant (STATUS says it); None: the one that serves.
            drain_s: how long what runs may go on, in seconds; None: the broker's ``drain_ms``.
            hold_s: how long requests wait for the next worker, in seconds; None: two minutes.
            on_progress: called in this thread with news.

        Raises:
            PermissionDenied: ``role_denied``: only an admin may.
            NotFound: ``no_such_device``.
            Unavailable: ``no_worker``; ``worker_lost``: it died instead.
            Aborted: ``worker_replaced``: the one that was meant has left already.
            DeadlineExceeded: ``worker_timeout``: it does not leave.
        """
        message = _request(device, worker_epoch, drain_s, hold_s)
        return typed(self._call(message, _patience_ms(message), on_progress), DrainReceipt)


class AsyncDraining(AsyncCalling):
    """Part of ``AsyncConductor``."""

    async def drain(
        self,
        device: str,
        *,
        worker_epoch: int | None = None,
        drain_s: float | None = None,
        hold_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> DrainReceipt:
        """Let the worker of a device leave; see ``Conductor.drain``."""
        message = _request(device, worker_epoch, drain_s, hold_s)
        return typed(await self._call(message, _patience_ms(message), on_progress), DrainReceipt)


def _request(
    device: str, worker_epoch: int | None, drain_s: float | None, hold_s: float | None
) -> DrainDevice:
    message = DrainDevice(
        rid=new_rid(),
        device=device,
        worker_epoch=worker_epoch,
        drain_ms=_ms("drain_s", drain_s),
        hold_ms=_ms("hold_s", hold_s),
    )
    check_drain(message)
    return message


def _ms(field: str, seconds: float | None) -> int | None:
    """Seconds → milliseconds; 0 is a time, too."""
    return checked_timeout_ms(field, seconds) if seconds else None if seconds is None else 0


def _patience_ms(message: DrainDevice) -> int:
    return checked_timeout_ms("drain_s", DRAIN_TIMEOUT_S) + (message.drain_ms or 0)
