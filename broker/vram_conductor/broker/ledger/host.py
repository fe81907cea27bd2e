"""Host memory promised beside one device: parked states and pinned backups. Pure.

    promised = Σ state:<agent> + spare + Σ pinned:<model>
    spare    = the largest of the states

A state is written beside the one before it, so that a crash leaves that one. States are written
one after the other, and only the one that is being written needs room twice: the worker takes
it from the spare halves of the others.
"""

from __future__ import annotations

from vram_conductor.broker.ledger.ordered import Multiset
from vram_conductor.protocol.values import AgentKey, Line


def alone_bytes(state_bytes: int) -> int:
    """What a ledger without anybody else promises for one state: itself, and the spare."""
    return 2 * state_bytes


class HostLedger:
    """Everybody's largest state, what writing one takes beside it, and the pinned backups."""

    __slots__ = ("_pinned", "_sizes", "_states", "_sum_bytes")

    def __init__(self) -> None:
        self._states: dict[AgentKey, Line] = {}
        self._sizes: Multiset[int] = Multiset()
        self._pinned: dict[str, Line] = {}
        self._sum_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """What is promised for the state that is being written."""
        return self._sizes.top if len(self._sizes) else 0

    @property
    def total_bytes(self) -> int:
        return self._sum_bytes + self.spare_bytes

    def growth_bytes(self, state_bytes: int) -> int:
        """What :meth:`add` would add to the total."""
        return state_bytes + max(0, state_bytes - self.spare_bytes)

    def largest_state(self, room_bytes: int) -> int:
        """The largest state with ``growth_bytes <= room_bytes``."""
        return min(room_bytes, max(self.spare_bytes, (room_bytes + self.spare_bytes) // 2))

    def add(self, agent: AgentKey, state_bytes: int) -> None:
        """An agent's largest parked state. The agent must not be here."""
        assert agent not in self._states
        self._states[agent] = Line(f"state:{agent}", state_bytes)
        self._sizes.add(state_bytes)
        self._sum_bytes += state_bytes

    def remove(self, agent: AgentKey) -> None:
        state_bytes = self._states.pop(agent).bytes
        self._sizes.remove(state_bytes)
        self._sum_bytes -= state_bytes

    def set_pinned(self, name: str, pinned_bytes: int) -> None:
        """A pinned backup's size; 0 removes it."""
        old = self._pinned.pop(name, None)
        self._sum_bytes += pinned_bytes - (old.bytes if old else 0)
        if pinned_bytes:
            self._pinned[name] = Line(f"pinned:{name}", pinned_bytes)

    def lines(self) -> tuple[Line, ...]:
        """``state:<agent>``, ``spare``, ``pinned:<model>``; their sum is the promise."""
        spare = (Line("spare", self.spare_bytes),) if self.spare_bytes else ()
        return (*self._states.values(), *spare, *self._pinned.values())

    def validate_state(self) -> None:
        """Recount. Raises AssertionError: our bug."""
        assert self.total_bytes == sum(line.bytes for line in self.lines())
        assert self.spare_bytes == max((line.bytes for line in self._states.values()), default=0)
