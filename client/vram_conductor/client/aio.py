"""The asyncio client. Same names and meanings as in :mod:`vram_conductor.client.sync`."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

from vram_conductor.client.aio_agent import AsyncAgent
from vram_conductor.client.aio_conversing import AsyncConversing
from vram_conductor.client.aio_lease import AsyncLease
from vram_conductor.client.aio_reply import AsyncReply
from vram_conductor.client.answers import typed, typed_agent
from vram_conductor.client.calls import CallMessage, call_key
from vram_conductor.client.core import ClientCore
from vram_conductor.client.draining import AsyncDraining
from vram_conductor.client.effects import Answered, Failed, News, RequestEffect
from vram_conductor.client.endpoint import KeyPath, default_endpoint, key_for
from vram_conductor.client.link import Link
from vram_conductor.client.loop_link import LoopLink
from vram_conductor.client.renewal import Renewal
from vram_conductor.client.requests import (
    DecodeOptions,
    LeaseOptions,
    Messages,
    RegisterOptions,
    TokenIds,
    build_decode,
    build_lease,
    build_register,
    build_release,
    build_unregister,
    checked_timeout_ms,
    timing,
)
from vram_conductor.client.surveying import AsyncSurveying
from vram_conductor.client.sync import LEASE_TIMEOUT_S, REGISTER_TIMEOUT_S
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import FailedPrecondition, error_from_info
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.status import AgentList, AgentStatus, LeaseStatus, StatusReport


class AsyncConductor(AsyncConversing, AsyncDraining, AsyncSurveying):
    """A connection to the broker, for one asyncio event loop.

    Open it with ``async with`` (or :meth:`connect` and :meth:`close`). It survives a lost
    connection and a restarted broker. Cancelling a task that waits for a request forgets the
    request; cancelling one that waits for a reply cancels the job.

    Args, Raises: as for ``Conductor``; the connection is made by :meth:`connect`.

    >>> async def main():
    ...     async with AsyncConductor() as conductor:
    ...         coder = await conductor.register("coder", "smollm2-135m", n_ctx=1024)
    ...         result = await coder.chat("Count to three.", temperature=0).result()
    ...         print(result.text)
    >>> asyncio.run(main())
    one, two, three.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        key: KeyPath | None = None,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        reconnect_s: float = 15.0,
        client: str = "vram-conductor python asyncio",
    ) -> None:
        self.endpoint: str = endpoint or default_endpoint()
        self._key = key_for(self.endpoint, key)
        self._timeout_ms = checked_timeout_ms("timeout_s", timeout_s)
        self._connect_ms = checked_timeout_ms("connect_timeout_s", connect_timeout_s)
        self._core = ClientCore(self.endpoint, client, timing(connect_timeout_s, reconnect_s))
        self._link: LoopLink | None = None
        self._ping_numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"AsyncConductor({self.endpoint!r})"

    @property
    def broker_epoch(self) -> int:
        """Which broker this is; another number means that it was restarted."""
        welcome = self._core.welcome
        return welcome.broker_epoch if welcome else 0

    @property
    def principal(self) -> str:
        """Whose agents this connection uses, as the broker says."""
        welcome = self._core.welcome
        return welcome.principal if welcome else ""

    @property
    def limits(self) -> dict[str, int]:
        """The broker's limits, by name."""
        welcome = self._core.welcome
        return dict(welcome.limits) if welcome else {}

    async def connect(self) -> None:
        """Find the broker.

        Raises:
            Unavailable: ``no_broker``: nobody answers; the message says what to do.
            InvalidArgument: ``bad_endpoint``.
        """
        if self._link is None:
            self._link = LoopLink(Link(self._core, self.endpoint, self._key))
            weakref.finalize(self, self._link.close_from_anywhere)
        try:
            await self._call(wire.Ping(n=next(self._ping_numbers)), self._connect_ms)
        except BaseException:
            self.close()
            raise

    async def register(
        self,
        agent: str,
        model: str,
        *,
        timeout_s: float = REGISTER_TIMEOUT_S,
        on_progress: Callable[[News], None] | None = None,
        **options: Unpack[RegisterOptions],
    ) -> AsyncAgent:
        """Admit an agent; see ``Conductor.register``."""
        message = build_register(new_rid(), agent, model, **options)
        body = await self._call(message, checked_timeout_ms("timeout_s", timeout_s), on_progress)
        return AsyncAgent(self, agent, typed_agent(body))

    def agent(self, name: str) -> AsyncAgent:
        """A handle of an agent that is registered already. Asks nobody."""
        return AsyncAgent(self, name, None)

    async def unregister(self, agent: str, *, principal: str | None = None) -> None:
        """Remove an agent; see ``Conductor.unregister``."""
        await self._call(build_unregister(new_rid(), agent, principal))

    def lease(
        self,
        name: str,
        size: int | str,
        *,
        timeout_s: float = LEASE_TIMEOUT_S,
        **options: Unpack[LeaseOptions],
    ) -> AsyncLease:
        """Device memory for a program that is no agent; see ``Conductor.lease``. It is asked for
        with ``async with``, or with ``await``."""
        message = build_lease(new_rid(), name, size, **options)
        renewal = Renewal(message, checked_timeout_ms("timeout_s", timeout_s))
        return AsyncLease(self, renewal, name)

    async def release_lease(self, name: str, *, principal: str | None = None) -> None:
        """End a lease of yours; see ``Conductor.release_lease``."""
        await self._call(build_release(new_rid(), name, principal))

    async def list(self) -> list[AgentStatus]:
        """Your agents, with their conversations."""
        return typed(await self._call(wire.List(rid=new_rid())), AgentList).agents

    async def status(self) -> StatusReport:
        """The whole picture: devices, ledgers, agents, queue."""
        return typed(await self._call(wire.Status(rid=new_rid())), StatusReport)

    async def ping(self, timeout_s: float | None = None) -> float:
        """Round trip to the broker and back, in milliseconds."""
        timeout_ms = self._timeout_ms
        if timeout_s is not None:
            timeout_ms = checked_timeout_ms("timeout_s", timeout_s)
        began_ns = time.monotonic_ns()
        await self._call(wire.Ping(n=next(self._ping_numbers)), timeout_ms)
        return (time.monotonic_ns() - began_ns) / 1e6

    def decode(
        self,
        agent: str,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        tokens: TokenIds | None = None,
        continue_: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> AsyncReply:
        """Run one job of ``agent``; see ``Agent.decode``. Starts at once, without ``await``."""
        message = build_decode(
            new_rid(),
            agent,
            prompt=prompt,
            messages=messages,
            tokens=tokens,
            continue_=continue_,
            **options,
        )
        return AsyncReply(self._opened(), self._core, message, self._timeout_ms, owner=self)

    def close(self) -> None:
        """Say BYE: ephemeral agents go, jobs that run and are not detached are cancelled, and
        their replies raise CANCELLED ``closed``. Idempotent."""
        if self._link is not None:
            self._link.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _opened(self) -> LoopLink:
        if self._link is None:
            raise FailedPrecondition(
                "not_connected",
                "this AsyncConductor is not open; use `async with AsyncConductor() as …`",
            )
        return self._link

    async def _lease(self, message: wire.Lease, timeout_ms: int) -> LeaseStatus:
        return typed(await self._call(message, timeout_ms), LeaseStatus)

    async def _call(
        self,
        message: CallMessage,
        timeout_ms: int | None = None,
        on_progress: Callable[[News], None] | None = None,
    ) -> dict[str, Any]:
        link, key = self._opened(), call_key(message)
        patience_ms = timeout_ms or self._timeout_ms
        inbox: asyncio.Queue[RequestEffect] = asyncio.Queue()
        link.submit(
            key,
            inbox.put_nowait,
            lambda: self._core.call(message, patience_ms, time.monotonic_ns()),
        )
        try:
            while True:
                effect = await inbox.get()
                if isinstance(effect, News) and on_progress is not None:
                    on_progress(effect)
                elif isinstance(effect, Answered):
                    return effect.body
                elif isinstance(effect, Failed):
                    raise error_from_info(effect.error.info)
        finally:
            # A cancelled task waits no more; after an answer this changes nothing.
            link.drop(key)
            link.perform(self._core.forget(key, time.monotonic_ns()))
