"""What only the stand-in can tell: which calls are made, and which are not.

``python -m vmm_stub_scenes NAME`` plays one scene.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest
from vmm_device import KIB, MIB, PIECE, StubDevice
from vmm_scenes import clear, fill, intact

from vram_conductor.protocol.errors import FailedPrecondition, ResourceExhausted

Scene = Callable[[StubDevice], None]
SCENES: dict[str, Scene] = {}


def scene(play: Scene) -> Scene:
    SCENES[play.__name__] = play
    return play


def copied(device: StubDevice, move: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a move copies in and out."""
    before = device.counts()
    move()
    after = device.counts()
    return after.in_bytes - before.in_bytes, after.out_bytes - before.out_bytes


@scene
def a_backup_is_made_once_and_only_what_is_wanted_comes_back(device: StubDevice) -> None:
    vmm, tag = device.vmm, device.vmm.new_tag()
    held = fill(device, tag, MIB, 5000)
    size = MIB + 5000
    assert copied(device, lambda: vmm.back_up(tag)) == (0, size)
    assert copied(device, lambda: vmm.back_up(tag)) == (0, 0)
    assert copied(device, lambda: vmm.sleep(tag, keep=True)) == (0, 0)
    assert copied(device, lambda: vmm.wake(tag)) == (size, 0)
    assert copied(device, lambda: vmm.sleep(tag, keep=False)) == (0, 0)
    assert copied(device, lambda: vmm.wake(tag)) == (0, 0)
    clear(device, held)


@scene
def little_is_under_way_at_once_so_that_others_get_their_turn(device: StubDevice) -> None:
    vmm, tag = device.vmm, device.vmm.new_tag()
    held = fill(device, tag, MIB, 5000, 3 * PIECE)
    vmm.back_up(tag)
    vmm.sleep(tag, keep=True)
    vmm.wake(tag)
    assert PIECE <= device.counts().ahead_bytes <= 2 * PIECE
    intact(device, held)
    clear(device, held)


@scene
def a_backup_is_what_was_there_when_it_was_made(device: StubDevice) -> None:
    """Weights do not change; whoever changes what is backed up gets the old."""
    tag = device.vmm.new_tag()
    held = fill(device, tag, 3000)
    device.vmm.back_up(tag)
    (address,) = held
    device.write(address, bytes(3000))
    device.vmm.sleep(tag, keep=True)
    device.vmm.wake(tag)
    assert intact(device, held)
    device.vmm.drop_backup(tag)
    device.write(address, bytes(3000))
    device.vmm.sleep(tag, keep=True)
    device.vmm.wake(tag)
    assert device.read(address, 3000) == bytes(3000)
    clear(device, held)


@scene
def a_wake_that_does_not_fit_asks_for_nothing(device: StubDevice) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, MIB, MIB)
    device.vmm.sleep(tag, keep=True)
    device.caps(3 * MIB // 2)  # the first of the two would fit
    before = device.counts().calls
    with pytest.raises(ResourceExhausted):
        device.vmm.wake(tag)
    assert device.counts().calls - before <= 3
    assert device.counts().memories == 0
    device.caps(64 * MIB)
    device.vmm.wake(tag)
    clear(device, held)


@scene
def contents_whose_backup_was_dropped_are_not_made_up(device: StubDevice) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, MIB)
    device.vmm.sleep(tag, keep=True)
    device.vmm.drop_backup(tag)
    for again in (device.vmm.wake, device.vmm.back_up):
        with pytest.raises(FailedPrecondition) as caught:
            again(tag)
        assert caught.value.reason == "backup_gone"
    assert device.vmm.stat(tag).mapped_bytes == 0
    clear(device, held)


@scene
def the_context_of_a_thread_is_as_it_was(device: StubDevice) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, MIB)
    depths: list[int] = []

    moves: list[Callable[[], object]] = [
        lambda: device.vmm.back_up(tag),
        lambda: device.vmm.sleep(tag, keep=True),
        lambda: device.vmm.wake(tag),
        lambda: device.vmm.drop_backup(tag),
        lambda: clear(device, held),
    ]

    def work() -> None:
        for move in moves:
            move()
            depths.append(device.counts().pushed)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert depths == [0] * 5


@scene
def nobody_else_is_waited_for(device: StubDevice) -> None:
    """Whoever moves or frees memory has waited for its own work."""
    tag = device.vmm.new_tag()
    before = device.counts().synchronised
    clear(device, fill(device, tag, MIB))
    held = fill(device, tag, MIB)
    device.vmm.sleep(tag, keep=True)
    device.vmm.wake(tag)
    device.vmm.sleep(tag, keep=True)
    clear(device, held)
    assert device.counts().synchronised == before


@scene
def asleep_it_faults(device: StubDevice) -> None:
    """In a child: reading what sleeps is no silent garbage on the stand-in, as on a GPU."""
    tag = device.vmm.new_tag()
    held = fill(device, tag, MIB)
    device.vmm.sleep(tag, keep=True)
    child = os.fork()
    if not child:
        device.read(next(iter(held)), 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGSEGV
    clear(device, held)


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefg"] + [
        ("used", ctypes.c_size_t),
        ("free", ctypes.c_size_t),
        ("top", ctypes.c_size_t),
    ]


@scene
def tags_that_have_nothing_take_no_memory(device: StubDevice) -> None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return
    library.mallinfo2.restype = _Heap

    def heap() -> int:
        return sum(getattr(library.mallinfo2(), name) for name in ("e", "used"))

    def cycle(times: int) -> None:
        for _ in range(times):
            tag = device.vmm.new_tag()
            with device.vmm.region(tag):
                address = device.malloc(KIB)
            device.vmm.sleep(tag, keep=True)
            assert device.free(address) == 0

    cycle(100)
    before = heap()
    cycle(2000)
    assert heap() - before < 64 * KIB, "a tag takes some hundred bytes"


def main() -> None:
    device = StubDevice()
    SCENES[sys.argv[1]](device)
    assert not any(device.counts().held().values()), device.counts().held()


if __name__ == "__main__":
    main()
