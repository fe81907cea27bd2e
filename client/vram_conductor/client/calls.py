"""Requests with one answer (*pure*): everything but DECODE. All of them may be sent twice."""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.client.effects import Answered, Failed, News, RequestEffect, Warn
from vram_conductor.client.session import DRAINING, MS
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.drain import DrainDevice
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    DeadlineExceeded,
    ErrorInfo,
    InvalidArgument,
    Unavailable,
    error_from_info,
)
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.messages import (
    Cancel,
    Error,
    Lease,
    List,
    Ok,
    Ping,
    Pong,
    Progress,
    Register,
    Reset,
    Status,
    Unregister,
)

CallMessage = (
    Register
    | Unregister
    | Fit
    | List
    | Status
    | Reset
    | Fork
    | History
    | Lease
    | DrainDevice
    | Ping
)
Answer = Ok | Error | Progress | Pong


def call_key(message: CallMessage) -> bytes:
    """What the answer is found by: the ``rid``, or for PING its number as 16 bytes."""
    return message.n.to_bytes(16, "big") if isinstance(message, Ping) else message.rid


@dataclass(slots=True)
class _Call:
    message: CallMessage
    timeout_ms: int
    deadline_ns: int
    times_sent: int = 0


class Calls:
    """The requests that wait for an answer, and the agents that live with the session."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, _Call] = {}
        self._ephemeral: dict[bytes, Register] = {}

    def add(self, message: CallMessage, timeout_ms: int, now_ns: int) -> None:
        deadline_ns = now_ns + timeout_ms * MS
        self._waiting[call_key(message)] = _Call(message, timeout_ms, deadline_ns)

    def sent(self, message: CallMessage) -> None:
        self._waiting[call_key(message)].times_sent += 1

    def drop(self, key: bytes) -> list[Cancel]:
        """Nobody waits for this answer any more; returns what to tell the broker."""
        call = self._waiting.pop(key, None)
        return [] if call is None else _withdrawal(call)

    def again(self) -> list[CallMessage]:
        """What to send in a fresh session: first the ephemeral agents, which would go with the
        old one, then every request that has no answer."""
        waiting = [call.message for call in self._waiting.values()]
        for call in self._waiting.values():
            call.times_sent += 1
        return [*(agent for agent in self._ephemeral.values() if agent not in waiting), *waiting]

    def answered(self, message: Answer, now_ns: int) -> list[RequestEffect | Warn]:
        """An answer; late ones for nobody give nothing."""
        if isinstance(message, Pong):
            key = message.n.to_bytes(16, "big") if 0 <= message.n < 1 << 128 else b""
        else:
            key = message.rid
        call = self._waiting.get(key)
        if call is None:
            return self._renewed(message)
        if isinstance(message, Progress):
            call.deadline_ns = max(call.deadline_ns, now_ns + call.timeout_ms * MS)
            return [News(key, message.stage, message.done, message.total, message.note)]
        request, reason = call.message, message.error.reason if isinstance(message, Error) else ""
        if reason == DRAINING and isinstance(request, Register):
            # Nothing was done: the next broker is asked.
            call.times_sent = 0
            return []
        del self._waiting[key]
        gone = isinstance(request, Unregister) or (isinstance(request, Lease) and request.ends)
        if isinstance(message, Error):
            # The first of two that remove something may have succeeded unheard.
            if not (gone and call.times_sent > 1 and message.error.code is Code.NOT_FOUND):
                return [Failed(key, _refusal(request, message.error))]
        elif isinstance(request, Register) and request.ephemeral:
            self._ephemeral[request.rid] = request
        if isinstance(request, Unregister):
            self._no_longer(request.agent)
        return [Answered(key, message.body if isinstance(message, Ok) else {})]

    def tick(
        self, now_ns: int, unavailable: Unavailable | None
    ) -> tuple[list[RequestEffect], list[Cancel]]:
        """Deadlines. ``unavailable`` is what to say instead where there is no session."""
        effects: list[RequestEffect] = []
        withdrawals: list[Cancel] = []
        for key, call in list(self._waiting.items()):
            if now_ns >= call.deadline_ns:
                withdrawals += self.drop(key)
                effects.append(Failed(key, unavailable or _late(call)))
        return effects, withdrawals

    def fail(self, error: ConductorError) -> list[RequestEffect]:
        """Every request fails with ``error``."""
        failed: list[RequestEffect] = [Failed(key, error) for key in self._waiting]
        self._waiting.clear()
        return failed

    def next_ns(self) -> int | None:
        return min((call.deadline_ns for call in self._waiting.values()), default=None)

    def _renewed(self, message: Answer) -> list[RequestEffect | Warn]:
        if not isinstance(message, Error) or message.rid not in self._ephemeral:
            return []
        agent = self._ephemeral.pop(message.rid)
        text = f"agent {agent.agent!r} was not taken over into the new session"
        return [Warn(f"{text}: {error_from_info(message.error)}")]

    def _no_longer(self, agent: str) -> None:
        for rid in [rid for rid, known in self._ephemeral.items() if known.agent == agent]:
            del self._ephemeral[rid]


def _withdrawal(call: _Call) -> list[Cancel]:
    """What takes time and nobody waits for is given up; all else is done at once anyway."""
    if isinstance(call.message, Register | Lease | Fit) and call.times_sent:
        return [Cancel(rid=call.message.rid)]
    return []


def _late(call: _Call) -> DeadlineExceeded:
    name = call.message.__struct_config__.tag
    return DeadlineExceeded(
        "no_answer",
        f"no answer to {name} within {call.timeout_ms} ms; look at `conductor status`, or give "
        "it more time with timeout_s",
        retryable=True,
        waited_ms=call.timeout_ms,
    )


def _refusal(request: CallMessage, said: ErrorInfo) -> ConductorError:
    """A broker of an older minor version cannot decode the name of a message that came later."""
    name = request.__struct_config__.tag
    if said.reason != "bad_message" or f"'{name}'" not in said.message:
        return error_from_info(said)
    return InvalidArgument(
        "bad_message",
        f"this broker is older than this program and does not know {name}: upgrade the broker "
        f"({said.message})",
    )
