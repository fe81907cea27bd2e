"""Host memory promised beside one device: parked states and pinned backups. Pure."""

from __future__ import annotations

from vram_conductor.protocol.values import AgentKey, Line


class HostLedger:
    """Σ over agents of their largest state + Σ pinned backups."""

    __slots__ = ("_pinned", "_states", "total_bytes")

    def __init__(self) -> None:
        self._states: dict[AgentKey, Line] = {}
        self._pinned: dict[str, Line] = {}
        self.total_bytes = 0

    def add(self, agent: AgentKey, state_bytes: int) -> None:
        """An agent's largest parked state. The agent must not be here."""
        assert agent not in self._states
        self._states[agent] = Line(f"state:{agent}", state_bytes)
        self.total_bytes += state_bytes

    def remove(self, agent: AgentKey) -> None:
        self.total_bytes -= self._states.pop(agent).bytes

    def set_pinned(self, name: str, pinned_bytes: int) -> None:
        """A pinned backup's size; 0 removes it."""
        old = self._pinned.pop(name, None)
        self.total_bytes += pinned_bytes - (old.bytes if old else 0)
        if pinned_bytes:
            self._pinned[name] = Line(f"pinned:{name}", pinned_bytes)

    def lines(self) -> tuple[Line, ...]:
        return (*self._states.values(), *self._pinned.values())

    def validate_state(self) -> None:
        """Recount. Raises AssertionError: our bug."""
        assert self.total_bytes == sum(line.bytes for line in self.lines())
