"""A lease, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from vram_conductor.client.renewal import Renewal
from vram_conductor.protocol.errors import ConductorError, NotFound
from vram_conductor.protocol.status import LeaseStatus

if TYPE_CHECKING:
    from vram_conductor.client.aio import AsyncConductor


class AsyncLease:
    """Made by ``AsyncConductor.lease``; asked for with ``async with`` or ``await``.

    ``async with`` waits until it is held, renews it in the background, and releases it at the
    end; after ``await`` alone it ends by itself, unless :meth:`renew` is called.

    Attributes:
        name: its name.
        info: what the broker said last; None before it is held.
        error: why the last renewal failed; None: it did not.

    >>> async def main():
    ...     async with AsyncConductor() as conductor:
    ...         async with conductor.lease("train", "3 GB", ttl_s=600) as lease:
    ...             print(f"now allocate {lease.info.bytes} bytes on {lease.info.device}")
    >>> asyncio.run(main())
    now allocate 3000000000 bytes on cpu
    """

    def __init__(self, conductor: AsyncConductor, renewal: Renewal, name: str) -> None:
        self._conductor = conductor
        self._renewal = renewal
        self._task: asyncio.Task[None] | None = None
        self.name = name
        self.info: LeaseStatus | None = None
        self.error: ConductorError | None = None

    def __repr__(self) -> str:
        return f"AsyncLease({self.name!r})"

    async def renew(self) -> LeaseStatus:
        """Ask for it, or for as much time again; see ``Lease.renew``."""
        try:
            ask = self._conductor._lease  # pyright: ignore[reportPrivateUsage] - a part of it
            info = await ask(self._renewal.message(), self._renewal.answer_ms)
        except ConductorError as error:
            self.error = error
            raise
        self.info, self.error = info, None
        return info

    async def release(self) -> None:
        """End it now; see ``Lease.release``."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        with contextlib.suppress(NotFound):
            await self._conductor.release_lease(self.name)

    def __await__(self) -> Generator[object, None, Self]:
        yield from self.renew().__await__()
        return self

    async def __aenter__(self) -> Self:
        if self.info is None:
            await self.renew()
        self._task = asyncio.create_task(self._keep(), name=f"lease {self.name}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Without a broker there is nothing to end: it goes with its time.
        with contextlib.suppress(ConductorError):
            await self.release()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._renewal.pause_s(failed=self.error is not None))
            with contextlib.suppress(ConductorError):
                await self.renew()
