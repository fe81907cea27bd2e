"""The blocking client."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

from vram_conductor.client.agent import Agent
from vram_conductor.client.answers import typed, typed_agent
from vram_conductor.client.calls import CallMessage, call_key
from vram_conductor.client.conversing import Conversing
from vram_conductor.client.core import ClientCore
from vram_conductor.client.draining import Draining
from vram_conductor.client.effects import Answered, Failed, News
from vram_conductor.client.endpoint import KeyPath, default_endpoint, key_for
from vram_conductor.client.inbox import Inbox
from vram_conductor.client.io_thread import IoThread
from vram_conductor.client.lease import Lease
from vram_conductor.client.link import Link
from vram_conductor.client.renewal import Renewal
from vram_conductor.client.reply import Reply
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
from vram_conductor.client.surveying import Surveying
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import error_from_info
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.status import AgentList, AgentStatus, LeaseStatus, StatusReport

LEASE_TIMEOUT_S = 60.0
"""Longer than a broker with the default ``lease_wait_ms`` waits for its worker."""

REGISTER_TIMEOUT_S = 660.0
"""Estimating and loading a large model takes minutes; a dead broker is noticed within seconds."""


class Conductor(Conversing, Draining, Surveying):
    """A connection to the broker, for programs without asyncio.

    Thread-safe: a thread of its own owns the socket, and any thread may call any method. It
    survives a lost connection and a restarted broker. It does not survive ``fork``: the child
    gets FAILED_PRECONDITION ``forked`` and makes its own. Ctrl-C while waiting is harmless: the
    request is forgotten, a reply can be read on.

    Args:
        endpoint: ``ipc:///path`` or ``tcp://host:port``; None: ``$VRAM_CONDUCTOR_CLIENTS``, else
            the configuration's, where ``conductor up`` listens.
        key: key file, for tcp; None: ``$VRAM_CONDUCTOR_CLIENT_KEY``, else the configuration's.
        timeout_s: how long requests may take, in seconds; for a job: until it is accepted.
        connect_timeout_s: how long to look for a broker.
        reconnect_s: how long to look for one after a loss, before running replies fail.
        client: a name for the broker's log.

    Raises:
        Unavailable: ``no_broker``: nobody answers; the message says what to do.
        Unauthenticated: ``key_required``, ``key_refused``, ``wrong_broker_key``.
        InvalidArgument: ``bad_endpoint``, ``bad_config``, ``bad_value``, ``bad_key_file``.

    >>> with Conductor() as conductor:
    ...     coder = conductor.register("coder", "smollm2-135m", n_ctx=1024, temperature=0)
    ...     coder.chat("Count to three.").result().text
    'one, two, three.'
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        key: KeyPath | None = None,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        reconnect_s: float = 15.0,
        client: str = "vram-conductor python",
    ) -> None:
        self.endpoint: str = endpoint or default_endpoint()
        self._timeout_ms = checked_timeout_ms("timeout_s", timeout_s)
        self._core = ClientCore(self.endpoint, client, timing(connect_timeout_s, reconnect_s))
        self._io = IoThread(Link(self._core, self.endpoint, key_for(self.endpoint, key)))
        self._ping_numbers = itertools.count(1)
        # Also at the interpreter's exit, so that the broker hears BYE.
        self._stop = weakref.finalize(self, self._io.stop)
        try:
            self.ping(connect_timeout_s)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Conductor({self.endpoint!r})"

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

    def register(
        self,
        agent: str,
        model: str,
        *,
        timeout_s: float = REGISTER_TIMEOUT_S,
        on_progress: Callable[[News], None] | None = None,
        **options: Unpack[RegisterOptions],
    ) -> Agent:
        """Admit an agent: reserve its bytes, load its model if that is not loaded yet.

        Repeating it with the same parameters changes nothing.

        Args:
            agent: its name, unique among yours.
            model: a name of the catalogue (``conductor models list``), or a path.
            timeout_s: how long it may take without news, in seconds.
            on_progress: called in this thread with news: ``stage``, ``done`` of ``total``.
            options: see :class:`RegisterOptions`, e.g. ``n_ctx=4096, temperature=0``.

        Raises:
            LedgerDeny: it does not fit now; its ``details`` and ``largest_n_ctx`` have the
                numbers, its text is one line for operators.
            OutOfRange: it can never fit, or a parameter is beyond the model's.
            NotFound: no such model or device.
            AlreadyExists: the name is taken, with other parameters.
            InvalidArgument: a wrong option.
        """
        message = build_register(new_rid(), agent, model, **options)
        body = self._call(message, checked_timeout_ms("timeout_s", timeout_s), on_progress)
        return Agent(self, agent, typed_agent(body))

    def agent(self, name: str) -> Agent:
        """A handle of an agent that is registered already. Asks nobody."""
        return Agent(self, name, None)

    def unregister(self, agent: str, *, principal: str | None = None) -> None:
        """Remove an agent; its jobs are cancelled, its conversations forgotten. ``principal``:
        whose, for an admin.

        Raises:
            NotFound: ``no_such_agent``. PermissionDenied: ``role_denied``: it is not yours.
        """
        self._call(build_unregister(new_rid(), agent, principal))

    def lease(
        self,
        name: str,
        size: int | str,
        *,
        timeout_s: float = LEASE_TIMEOUT_S,
        on_progress: Callable[[News], None] | None = None,
        **options: Unpack[LeaseOptions],
    ) -> Lease:
        """Ask for device memory for this program, or another one that is no agent; returns when
        it is free. Agents that do not fit beside it wait, and lose no conversation.

        Args:
            name: unique among your leases. The same again renews it.
            size: bytes, or a text such as ``"3 GB"``.
            timeout_s: how long it may take without news, in seconds.
            on_progress: called in this thread with news: ``done`` of ``total`` bytes are free.
            options: see :class:`LeaseOptions`, e.g. ``ttl_s=600, device="cuda:0"``.

        Raises:
            LedgerDeny: others or other leases have the memory; ``details`` has the numbers.
            OutOfRange: so much can never be leased.
            DeadlineExceeded: ``lease_timeout``: agents did not make room in time.
            AlreadyExists: ``lease_exists``: with another size, device or kind.
            NotFound: no such device. Unavailable: it has no worker now.
        """
        message = build_lease(new_rid(), name, size, **options)
        renewal = Renewal(message, checked_timeout_ms("timeout_s", timeout_s))
        return Lease(self, renewal, self._lease(message, renewal.answer_ms, on_progress))

    def release_lease(self, name: str, *, principal: str | None = None) -> None:
        """End a lease of yours, whoever holds it. ``principal``: whose, for an admin.

        Raises:
            NotFound: ``no_such_lease``. PermissionDenied: ``role_denied``: it is not yours.
        """
        self._call(build_release(new_rid(), name, principal))

    def list(self) -> list[AgentStatus]:
        """Your agents, with their conversations."""
        return typed(self._call(wire.List(rid=new_rid())), AgentList).agents

    def status(self) -> StatusReport:
        """The whole picture: devices, ledgers, agents, queue."""
        return typed(self._call(wire.Status(rid=new_rid())), StatusReport)

    def ping(self, timeout_s: float | None = None) -> float:
        """Round trip to the broker and back, in milliseconds.

        Raises:
            Unavailable: ``no_broker``.
            DeadlineExceeded: ``no_answer``.
        """
        timeout_ms = self._timeout_ms
        if timeout_s is not None:
            timeout_ms = checked_timeout_ms("timeout_s", timeout_s)
        began_ns = time.monotonic_ns()
        self._call(wire.Ping(n=next(self._ping_numbers)), timeout_ms)
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
    ) -> Reply:
        """Run one job of ``agent``; see :meth:`Agent.decode`."""
        message = build_decode(
            new_rid(),
            agent,
            prompt=prompt,
            messages=messages,
            tokens=tokens,
            continue_=continue_,
            **options,
        )
        return Reply(self._io, message, self._timeout_ms, owner=self)

    def close(self) -> None:
        """Say BYE: ephemeral agents go, jobs that run and are not detached are cancelled, and
        their replies raise CANCELLED ``closed``. Idempotent."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lease(
        self,
        message: wire.Lease,
        timeout_ms: int,
        on_progress: Callable[[News], None] | None = None,
    ) -> LeaseStatus:
        return typed(self._call(message, timeout_ms, on_progress), LeaseStatus)

    def _call(
        self,
        message: CallMessage,
        timeout_ms: int | None = None,
        on_progress: Callable[[News], None] | None = None,
    ) -> dict[str, Any]:
        key, patience_ms = call_key(message), timeout_ms or self._timeout_ms
        inbox = Inbox()
        self._io.submit(
            key, inbox.put, lambda core, now_ns: core.call(message, patience_ms, now_ns)
        )
        try:
            while True:
                effect = inbox.get()
                if isinstance(effect, News) and on_progress is not None:
                    on_progress(effect)
                elif isinstance(effect, Answered):
                    return effect.body
                elif isinstance(effect, Failed):
                    raise error_from_info(effect.error.info)
        finally:
            # After Ctrl-C nobody waits any more; after an answer this changes nothing.
            self._io.drop(key)
            self._io.post(lambda core, now_ns: core.forget(key, now_ns))
