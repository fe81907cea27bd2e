"""Messages on their way to the broker, with the epochs filled in. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from vram_conductor.protocol.commands import Command, Reply
from vram_conductor.protocol.errors import ConductorError, ErrorInfo, Internal
from vram_conductor.worker.origin import origin

Sent = tuple[msgspec.Struct, list[bytes]]
"""A message and its raw buffers."""


class Outbox:
    """Collects messages until the shell takes them.

    Attributes:
        hurry: asks the shell to take them now, because something that takes a while comes next.
    """

    def __init__(self, worker_epoch: int) -> None:
        self.worker_epoch = worker_epoch
        self.hurry: Callable[[], None] = lambda: None
        self._messages: list[Sent] = []

    def reply(
        self, kind: type[Reply], command: Command, raw: bytes | None = None, **fields: Any
    ) -> None:
        """Queue a reply to ``command``."""
        message = kind(
            broker_epoch=command.broker_epoch,
            op=command.op,
            worker_epoch=self.worker_epoch,
            **fields,
        )
        self._messages.append((message, [] if raw is None else [raw]))

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._messages)

    def take(self) -> list[Sent]:
        """All messages, oldest first; the outbox is empty afterwards."""
        messages, self._messages = self._messages, []
        return messages


def info_of(error: Exception) -> ErrorInfo:
    """The error as it travels; anything untyped is our own bug, and says where it is."""
    if isinstance(error, ConductorError):
        return error.info
    where: dict[str, Any] = {**origin(error)}
    return Internal(
        "internal_error",
        f"the worker failed with {where['error']} in {where.get('at', 'an unknown place')}; "
        "please report it; its log has the details",
        **where,
    ).info
