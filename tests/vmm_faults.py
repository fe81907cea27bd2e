"""Every call of the driver fails once, in every move: nothing leaks, the state is told, and the
move can be made again. ``python -m vmm_faults MOVE`` plays it on the stand-in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from vmm_device import KIB, StubDevice
from vmm_scenes import fill, intact, rounded

from vram_conductor.protocol.errors import ConductorError, Internal, ResourceExhausted

SIZES = (150 * KIB, 3 * KIB)
"""One of several pieces of pinned memory, and one that is rounded up."""

OUT_OF_MEMORY = 2


@dataclass
class Play:
    """A tag with memory in it, and one move to be made with it."""

    device: StubDevice
    tag: int
    held: dict[int, bytes] = field(default_factory=dict)

    def fill(self) -> None:
        self.held = fill(self.device, self.tag, *SIZES)

    def free(self) -> None:
        for address in list(self.held):
            code = self.device.free(address)
            if code:
                raise Internal("driver_error", str(code))
            del self.held[address]

    def allocate(self) -> None:
        """Both or as many as come."""
        with self.device.vmm.region(self.tag):
            for size in SIZES[len(self.held) :]:
                self.held[self.device.malloc(size)] = b""


Step = Callable[[Play], None]


def nothing(play: Play) -> None:
    pass


def backed_up(play: Play) -> None:
    play.fill()
    play.device.vmm.back_up(play.tag)


def asleep(play: Play) -> None:
    play.fill()
    play.device.vmm.sleep(play.tag, keep=True)


def emptied(play: Play) -> None:
    play.fill()
    play.device.vmm.sleep(play.tag, keep=False)


MOVES: dict[str, tuple[Step, Step, bool]] = {
    "allocate": (nothing, Play.allocate, False),
    "back_up": (Play.fill, lambda play: play.device.vmm.back_up(play.tag), True),
    "drop_backup": (backed_up, lambda play: play.device.vmm.drop_backup(play.tag), True),
    "sleep": (backed_up, lambda play: play.device.vmm.sleep(play.tag, keep=True), True),
    "sleep_and_back_up": (Play.fill, lambda play: play.device.vmm.sleep(play.tag, True), True),
    "sleep_without": (Play.fill, lambda play: play.device.vmm.sleep(play.tag, False), False),
    "wake": (asleep, lambda play: play.device.vmm.wake(play.tag), True),
    "wake_without": (emptied, lambda play: play.device.vmm.wake(play.tag), False),
    "free": (Play.fill, Play.free, False),
    "free_backed_up": (backed_up, Play.free, False),
    "free_asleep": (asleep, Play.free, False),
}
"""What comes before, the move, and whether the contents are the same afterwards."""


def elsewhere(work: Callable[[], None]) -> BaseException | None:
    """In a thread that has no CUDA context, as the worker's are; what it raised."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except (ConductorError, MemoryError) as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return caught[0] if caught else None


def check(play: Play, error: BaseException | None, name: str) -> None:
    """After a move that may have failed."""
    stat = play.device.vmm.stat(play.tag)
    counts = play.device.counts()
    assert stat.allocations == counts.ranges == len(play.held), "every block is known"
    assert stat.mapped_bytes == counts.used_bytes, "no memory that is nobody's"
    assert stat.backup_bytes == counts.host_bytes
    if name.startswith("free"):
        return
    assert stat.mapped_bytes in (0, stat.bytes), "all or nothing"
    if error is not None and name.startswith("wake"):
        assert stat.mapped_bytes == 0, "it sleeps on"
    if error is not None and name in ("sleep", "sleep_and_back_up", "sleep_without"):
        assert stat.mapped_bytes == stat.bytes, "it is awake again"
    if error is not None and name in ("back_up", "sleep_and_back_up"):
        assert stat.backup_bytes in (0, sum(SIZES))
    if error is not None and name == "sleep":
        assert intact(play.device, play.held), "brought back from its backup"


def play(device: StubDevice, name: str, nth: int, code: int) -> BaseException | None:
    """One move with its ``nth`` driver call failing; then again without."""
    before, move, kept = MOVES[name]
    one = Play(device, device.vmm.new_tag())
    before(one)
    device.arm(nth, code=code)
    error = elsewhere(lambda: move(one))
    device.arm(0)
    check(one, error, name)
    if error is not None:
        assert elsewhere(lambda: move(one)) is None, "the second try"
    device.vmm.wake(one.tag)
    if kept:
        assert intact(device, one.held)
    if one.held:
        assert device.vmm.stat(one.tag).bytes == rounded(device, *SIZES)
    assert elsewhere(one.free) is None
    assert not any(device.counts().held().values()), (name, nth, device.counts().held())
    return error


def calls_of(device: StubDevice, name: str) -> int:
    """How many driver calls the move makes."""
    before, move, _ = MOVES[name]
    one = Play(device, device.vmm.new_tag())
    before(one)
    count = int(device.counts().calls)
    assert elsewhere(lambda: move(one)) is None
    count = int(device.counts().calls) - count
    one.free()
    return count


def main() -> None:
    name = sys.argv[1]
    device = StubDevice()
    calls = calls_of(device, name)
    assert calls >= 2
    failed = 0
    for nth in range(1, calls + 1):
        for code in (719, OUT_OF_MEMORY):
            error = play(device, name, nth, code)
            failed += error is not None
            if isinstance(error, ResourceExhausted):
                assert name.startswith("wake"), error
                assert code == OUT_OF_MEMORY
    assert failed >= 2 * (calls - 2), "only leaving a context may fail without consequence"


if __name__ == "__main__":
    main()
