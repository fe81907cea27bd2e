"""ESTIMATE commands, a few at a time (*pure*).

A worker answers them one after another. Sent all at once, those of a hundred agents that come back
after a restart would run into their own timeout; so the clock of each starts when its turn is near.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vram_conductor.broker.state import State
from vram_conductor.broker.workers.absence import no_worker
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import OnLost, ReplyMessage
from vram_conductor.protocol.commands import Estimate
from vram_conductor.protocol.errors import ErrorInfo

UNDER_WAY_MAX = 4
"""Estimates that one worker has at a time."""

Build = Callable[[int, int], Estimate]


@dataclass(slots=True, eq=False)
class Question:
    """One ESTIMATE: waiting for its turn, under way (``op``), or over."""

    device: str
    build: Build
    on_reply: Callable[[ReplyMessage], None]
    on_lost: OnLost
    op: int = 0


class Asking:
    """Sends estimates in the order in which they were asked for."""

    def __init__(self, state: State, commander: Commander) -> None:
        self._state = state
        self._commander = commander
        self._waiting: dict[str, deque[Question]] = {}
        self._under_way: dict[str, set[Question]] = {}

    def ask(
        self,
        device: Device,
        build: Build,
        on_reply: Callable[[ReplyMessage], None],
        on_lost: OnLost,
    ) -> Question:
        """Ask the device's worker, now or when it is less busy. One of the callbacks follows,
        never before this returns, unless :meth:`cancel` comes first."""
        question = Question(device.id, build, on_reply, on_lost)
        self._waiting.setdefault(device.id, deque()).append(question)
        self._pump(device)
        return question

    def cancel(self, question: Question) -> None:
        """Nobody wants the answer any more. Idempotent."""
        device = self._state.devices[question.device]
        waiting = self._waiting.get(device.id)
        if waiting is not None and question in waiting:
            waiting.remove(question)
        elif question in self._under_way.get(device.id, ()):
            self._commander.drop(device, question.op)
            self._over(question)

    def lost(self, device: Device) -> None:
        """The device has lost its worker: what waited for its turn will not get one. (What was
        under way has been told already.)"""
        for question in self._waiting.pop(device.id, ()):
            question.on_lost(no_worker(self._state, device.id))

    def _pump(self, device: Device) -> None:
        waiting = self._waiting.get(device.id)
        under_way = self._under_way.setdefault(device.id, set())
        while waiting and device.ready and len(under_way) < UNDER_WAY_MAX:
            self._send(device, waiting.popleft())

    def _send(self, device: Device, question: Question) -> None:
        self._under_way[device.id].add(question)

        def reply(message: ReplyMessage, raw: list[bytes]) -> bool:
            self._over(question)
            question.on_reply(message)
            return True

        def lost(error: ErrorInfo) -> None:
            self._over(question)
            question.on_lost(error)

        question.op = self._commander.send(
            device,
            question.build,
            on_reply=reply,
            on_lost=lost,
            timeout_ms=self._state.config.broker.estimate_timeout_ms,
        )

    def _over(self, question: Question) -> None:
        """Its place is free for the next one."""
        self._under_way[question.device].discard(question)
        self._pump(self._state.devices[question.device])
