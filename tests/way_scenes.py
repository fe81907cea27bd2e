"""Wakes and small copies to the device share one way, on stand-ins.

``python -m way_scenes NAME`` plays one scene in a process with the preload library.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
from gather_scenes import Copier
from vmm_device import PIECE
from vmm_scenes import clear, fill, intact

from vram_conductor.protocol.errors import Internal
from vram_conductor.worker.vmm.pace import PIECE_VARIABLE

SECOND_NS = 1_000_000_000
LONG_NS, SHORT_NS = 60 * SECOND_NS, SECOND_NS // 10
PATIENCE_S = 30.0
PIECES, CHUNK = 100, 64 << 10

Scene = Callable[[], None]
SCENES: dict[str, Scene] = {}


def scene(play: Scene) -> Scene:
    SCENES[play.__name__] = play
    return play


class Sleeper:
    """A model of a hundred pieces that sleeps.

    Attributes:
        wake_s: what its wake took.
    """

    def __init__(
        self, copier: Copier, give_way_ns: int, piece_bytes: int = PIECE, *, pace: bool = True
    ) -> None:
        self.vmm, self.device, self.wake_s = copier.vmm, copier.device, 0.0
        if pace:
            self.vmm.pace(piece_bytes, give_way_ns)
        self.tag = self.vmm.new_tag()
        self.held = fill(self.device, self.tag, PIECES * PIECE)
        self.vmm.sleep(self.tag, keep=True)

    def wake(self) -> None:
        begun = time.monotonic()
        self.vmm.wake(self.tag)
        self.wake_s = time.monotonic() - begun
        assert intact(self.device, self.held)
        clear(self.device, self.held)


def until(look: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end_s, "it never happened"


@contextmanager
def under_way(copier: Copier, copy: Callable[[], object]) -> Generator[threading.Thread]:
    """Another thread copies, gathered, and nothing lands before the caller lets it
    (``cudart_hold(0)``), or leaves."""

    def work() -> None:
        with copier.vmm.gathered():
            copy()

    runtime = copier.device.runtime
    runtime.cudart_hold(1)
    thread = threading.Thread(target=work)
    thread.start()
    until(runtime.cudart_queued)
    try:
        yield thread
    finally:
        runtime.cudart_hold(0)
        thread.join(PATIENCE_S)


@scene
def a_wake_waits_for_who_copies_in_but_not_for_ever_and_once() -> None:
    copier = Copier(1000)
    sleeper = Sleeper(copier, SHORT_NS)
    with under_way(copier, lambda: copier.back(0, 0, 1000)):
        sleeper.wake()
        assert copier.device.runtime.cudart_queued() == 1, "it was held back all the time"
    assert sleeper.wake_s >= SHORT_NS / SECOND_NS, "it did not wait"
    assert sleeper.wake_s < PIECES / 4 * SHORT_NS / SECOND_NS, "it waited with every piece"


@scene
def every_wake_has_patience_anew() -> None:
    copier = Copier(1000)
    for _ in range(2):
        sleeper = Sleeper(copier, SHORT_NS)
        with under_way(copier, lambda: copier.back(0, 0, 1000)):
            sleeper.wake()
        assert sleeper.wake_s >= SHORT_NS / SECOND_NS


@scene
def it_goes_on_when_the_way_is_free() -> None:
    copier = Copier(1000)
    sleeper = Sleeper(copier, LONG_NS)
    thread = threading.Thread(target=sleeper.wake)
    with under_way(copier, lambda: copier.back(0, 0, 1000)):
        thread.start()
    thread.join(PATIENCE_S)
    assert 0 < sleeper.wake_s < LONG_NS / SECOND_NS
    # And for who comes later, too: the way was given back.
    again = Sleeper(copier, LONG_NS)
    again.wake()


@scene
def what_goes_the_other_way_and_what_is_not_paced_is_not_waited_for() -> None:
    copier = Copier(1000)
    for piece, copy in (
        (PIECE, lambda: copier.out(0, 0, 1000)),
        (0, lambda: copier.back(0, 0, 1000)),
    ):
        sleeper = Sleeper(copier, LONG_NS, piece)
        thread = threading.Thread(target=sleeper.wake)
        with under_way(copier, copy):
            thread.start()
            thread.join(PATIENCE_S)
            assert sleeper.wake_s > 0, "it waits"


@scene
def a_copy_that_fails_gives_the_way_back() -> None:
    copier = Copier(1000)
    for nth in (1, 2):
        copier.device.runtime.cudart_arm(nth)
        with pytest.raises(Internal, match="719"), copier.vmm.gathered():
            copier.back(0, 0, 1000)
        Sleeper(copier, LONG_NS).wake()


@scene
def pieces_are_as_large_as_they_are_wanted() -> None:
    """Two are under way; none is larger than a chunk of pinned memory, which is 64 KiB here."""
    for piece, ahead in ((PIECE, CHUNK), (CHUNK, 2 * CHUNK), (0, PIECES * PIECE)):
        copier = Copier(100)
        Sleeper(copier, 0, piece).wake()
        assert copier.device.counts().ahead_bytes == ahead, piece


@scene
def the_environment_says_it_too() -> None:
    """See ``ENVIRONMENT``."""
    copier = Copier(100)
    sleeper = Sleeper(copier, 0, CHUNK, pace=False)
    sleeper.wake()
    assert copier.device.counts().ahead_bytes == 2 * CHUNK


ENVIRONMENT = {the_environment_says_it_too.__name__: {PIECE_VARIABLE: str(CHUNK)}}
"""What a scene is to be played with."""

if __name__ == "__main__":
    SCENES[sys.argv[1]]()
