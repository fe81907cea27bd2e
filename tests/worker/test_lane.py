"""Lanes, and what is under way on them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial

import pytest

from vram_conductor.worker.lane import Errand, InlineLanes, Lanes, Report, ThreadLanes
from vram_conductor.worker.traffic import Haul, Traffic

PATIENCE_S = 20.0


class Note(Errand):
    """Does what a test says, and notes when it was finished."""

    def __init__(self, lane: str, work: Callable[[], None], ends: list[str]) -> None:
        super().__init__(lane)
        self._work, self._ends = work, ends

    def do(self, report: Report) -> None:
        self._work()

    def finish(self, *, over: bool) -> None:
        assert over
        self._ends.append(self.lane)


def nothing() -> None:
    pass


@pytest.fixture
def threads() -> Iterator[ThreadLanes]:
    lanes = ThreadLanes(nothing)
    yield lanes
    lanes.close()


@pytest.mark.parametrize("kind", [InlineLanes, ThreadLanes])
def test_an_error_comes_back_with_its_errand(kind: type[InlineLanes] | type[ThreadLanes]) -> None:
    lanes: Lanes = InlineLanes() if kind is InlineLanes else ThreadLanes(nothing)

    def fail() -> None:
        raise ValueError("no")

    lanes.submit(Note("a", fail, []))
    (done,) = lanes.wait()
    assert done.over
    assert isinstance(done.error, ValueError)
    lanes.close()


def test_lanes_run_side_by_side_and_what_comes_back_together_is_in_order() -> None:
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    lanes, barrier = ThreadLanes(lambda: woken.put(None)), threading.Barrier(3)
    gates = {name: threading.Event() for name in "abc"}

    def work(name: str) -> None:
        barrier.wait(PATIENCE_S)
        assert gates[name].wait(PATIENCE_S)

    for serial, name in enumerate("abc"):
        errand = Note(name, partial(work, name), [])
        errand.serial = serial
        lanes.submit(errand)
    for name in "cab":
        gates[name].set()
        woken.get(timeout=PATIENCE_S)
    done = lanes.finished()
    assert [item.error for item in done] == [None] * 3
    assert [item.lane for item in done] == list("abc")
    assert lanes.finished() == []
    lanes.close()


def test_a_lane_ends_when_it_is_not_kept(threads: ThreadLanes) -> None:
    def alive() -> set[str]:
        return {item.name for item in threading.enumerate()} & {"lane one", "lane two"}

    for name in ("one", "two"):
        threads.submit(Note(name, nothing, []))
        threads.wait()
    assert alive() == {"lane one", "lane two"}
    threads.keep({"two"})
    assert alive() == {"lane two"}
    threads.submit(Note("one", nothing, []))
    threads.wait()
    threads.close()
    assert alive() == set()


def haul(pools: set[str], ends: list[str], work: Callable[[], None] = nothing) -> Haul:
    def then(error: Exception | None) -> None:
        ends.append("hauled")

    return Haul((frozenset(pools), frozenset({"m"})), work, then)


def test_what_is_under_way_is_known_until_it_has_come_back(threads: ThreadLanes) -> None:
    traffic, ends, gate = Traffic(threads), list[str](), threading.Event()
    landed: list[int] = []
    traffic.landed = lambda: landed.append(len(ends))

    def wait() -> None:
        assert gate.wait(PATIENCE_S)

    traffic.begin(Note("a", wait, ends))
    traffic.begin(haul({"b", "c"}, ends, wait))
    assert [traffic.occupied(name) for name in "abcd"] == [True, True, True, False]
    assert [traffic.hauled(name) for name in "abcd"] == [False, True, True, False]
    assert traffic.moves_weights("m")
    assert not traffic.moves_weights("n")
    assert traffic.quiet("d")
    assert not traffic.quiet("ad")
    assert traffic.free("d")
    traffic.hold("d")
    assert not traffic.free("d")
    assert traffic.progress(patient=False) == (0, True)
    gate.set()
    traffic.quiesce("a")
    assert "a" in ends
    traffic.quiesce()
    assert sorted(ends) == ["a", "hauled"]
    assert landed == [1, 2]
    assert traffic.idle
    assert traffic.progress(patient=False) == (2, False)


class Together:
    """Lanes from which all comes back at once."""

    parallel, ahead = True, 1

    def __init__(self) -> None:
        self._under_way: list[Errand] = []

    def submit(self, errand: Errand) -> None:
        self._under_way.append(errand)

    def finished(self) -> list[Errand]:
        back: list[Errand] = []
        for errand in self._under_way:
            errand.carry_out(back.append)
        self._under_way = []
        return back

    def wait(self) -> list[Errand]:
        back = self.finished()
        assert back, "this would wait for ever: all has come back already"
        return back

    def keep(self, names: Collection[str]) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_is_finished_may_wait_for_what_came_back_with_it() -> None:
    traffic, ends = Traffic(Together()), list[str]()

    def then(error: Exception | None) -> None:
        traffic.quiesce(["a"])
        ends.append("hauled")

    traffic.begin(Haul((frozenset("b"), frozenset()), nothing, then))
    traffic.begin(Note("a", nothing, ends))
    assert traffic.collect()
    assert ends == ["a", "hauled"]
    assert traffic.idle


def test_a_haul_that_may_take_its_time_is_no_reason_to_worry(threads: ThreadLanes) -> None:
    traffic, ends, gate = Traffic(threads), list[str](), threading.Event()

    def wait() -> None:
        assert gate.wait(PATIENCE_S)

    traffic.begin(haul({"b"}, ends, wait))
    assert traffic.progress(patient=False) == (0, True)
    assert traffic.progress(patient=True) == (1, False)
    gate.set()
    traffic.quiesce()


def test_inline_everything_is_finished_on_return() -> None:
    traffic, ends = Traffic(InlineLanes()), list[str]()
    traffic.begin(Note("a", nothing, ends))
    traffic.begin(haul({"a"}, ends))
    assert ends == ["a", "hauled"]
    assert traffic.idle


class Ahead(Errand):
    """Reports until it is wanted back."""

    def __init__(self) -> None:
        super().__init__("a")
        self.reports = 0
        self.ends = 0

    def do(self, report: Report) -> None:
        while not self.stop:
            report(self)

    def finish(self, *, over: bool) -> None:
        self.reports += 1
        self.ends += over


def test_a_lane_that_runs_ahead_is_called_back(threads: ThreadLanes) -> None:
    traffic, errand = Traffic(threads), Ahead()
    traffic.begin(errand)
    while errand.reports < 5:
        traffic.collect()
    assert not traffic.quiet("a"), "it has only reported"
    traffic.hold("a")
    traffic.quiesce("a")
    assert errand.ends >= 1
    assert traffic.idle
