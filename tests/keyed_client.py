"""A client of the scripted broker core that has a key."""

from __future__ import annotations

from typing import Any

from scripted_worker import Bench, Client

from vram_conductor.broker.events import ClientMessageIn
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.keys import Role


class Keyed(Client):
    """A client with a session and a key; its role may change at any time."""

    def __init__(self, bench: Bench, key: str, principal: str, role: Role = "owner") -> None:
        super().__init__(bench, key.encode(), principal)
        self.key = key
        self.role = role
        self.send(m.Hello(v=(1, 0)))

    def send(self, message: Any) -> None:
        self.bench.post(
            ClientMessageIn(self.peer, self.principal, False, message, self.role, self.key)
        )
