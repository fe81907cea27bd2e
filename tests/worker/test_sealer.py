"""The sealing thread: every committed state is sealed, each waiting arena once."""

from __future__ import annotations

import threading

from vram_conductor.worker.sealer import Sealer


class SlowArena:
    """An arena whose sealing waits to be let through; counts what happens to it."""

    def __init__(self) -> None:
        self.state = self.sealed = self.seals = self.holds = 0
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1

    def pin_some(self) -> str:
        return "done"

    def seal(self) -> bool:
        seen = self.state
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        self.sealed, self.seals = seen, self.seals + 1
        return seen == self.state


def test_a_state_parked_again_while_it_waits_is_sealed_once() -> None:
    sealer, busy, other = Sealer(), SlowArena(), SlowArena()
    sealer.submit(busy)  # type: ignore[arg-type]
    assert busy.entered.acquire(timeout=10)
    for state in range(1, 101):
        other.state = state
        sealer.submit(other)  # type: ignore[arg-type]
    busy.gate.release()
    other.gate.release()
    sealer.close()
    assert (other.seals, other.sealed, other.holds) == (1, 100, 0)


def test_a_state_committed_while_the_one_before_is_sealed_gets_its_own_turn() -> None:
    sealer, arena = Sealer(), SlowArena()
    arena.state = 1
    sealer.submit(arena)  # type: ignore[arg-type]
    assert arena.entered.acquire(timeout=10)
    arena.state = 2
    sealer.submit(arena)  # type: ignore[arg-type]
    arena.gate.release(2)
    sealer.settle()
    assert (arena.seals, arena.sealed, arena.holds) == (2, 2, 0)
    sealer.close()
