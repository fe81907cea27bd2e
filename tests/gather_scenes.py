"""Copies that go together, on stand-ins that copy when they are waited for and not before.

``python -m gather_scenes NAME`` plays one scene in a process with the preload library.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
from collections.abc import Callable

import pytest
from vmm_device import StubDevice

from vram_conductor.protocol.errors import Internal

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
STREAM = 2  # cudaStreamPerThread


class Copier:
    """Two pieces of memory, and copies between them as llama.cpp makes them."""

    def __init__(self, size: int) -> None:
        self.device = StubDevice()
        self.vmm = self.device.vmm
        client, void = self.device.client, ctypes.c_void_p
        client.client_copy.argtypes = [void, void, ctypes.c_size_t, ctypes.c_int, void]
        client.client_wait.argtypes = [void]
        self.there = ctypes.create_string_buffer(random.Random(1).randbytes(size), size)
        self.here = ctypes.create_string_buffer(size)

    def out(self, to: int, at: int, n: int, stream: int = STREAM, *, wait: bool = True) -> int:
        """``n`` bytes from ``at`` of the device to ``to`` of the host."""
        host, there = ctypes.addressof(self.here) + to, ctypes.addressof(self.there) + at
        code = self.device.client.client_copy(host, there, n, TO_HOST, stream)
        return int(code or (self.device.client.client_wait(stream) if wait else 0))

    def back(self, to: int, at: int, n: int) -> int:
        """``n`` bytes from ``at`` of the host to ``to`` of the device."""
        there, host = ctypes.addressof(self.there) + to, ctypes.addressof(self.here) + at
        code = self.device.client.client_copy(there, host, n, TO_DEVICE, STREAM)
        return int(code or self.device.client.client_wait(STREAM))

    def counts(self) -> tuple[int, int]:
        """Copies and waits since the last call."""
        made, waited = ctypes.c_int(), ctypes.c_int()
        self.device.runtime.cudart_copies(ctypes.byref(made), ctypes.byref(waited))
        return made.value, waited.value


Scene = Callable[[], None]
SCENES: dict[str, Scene] = {}


def scene(play: Scene) -> Scene:
    SCENES[play.__name__] = play
    return play


@scene
def outside_every_copy_is_waited_for() -> None:
    copier = Copier(1000)
    for at in range(0, 1000, 100):
        assert copier.out(at, at, 100) == 0
        assert copier.here.raw[at : at + 100] == copier.there.raw[at : at + 100]
    assert copier.counts() == (10, 10)


@scene
def tensors_of_one_sequence_are_waited_for_once() -> None:
    copier = Copier(10_000)
    with copier.vmm.gathered():
        for layer in range(8):
            assert copier.out(1000 * layer + 12, 1100 * layer, 900) == 0
    assert copier.counts()[1] == 1
    for layer in range(8):
        there = copier.there.raw[1100 * layer : 1100 * layer + 900]
        assert copier.here.raw[1000 * layer + 12 : 1000 * layer + 912] == there


@scene
def cells_that_take_turns_are_one_copy() -> None:
    """A prompt of 100 cells, then 200 cells that alternate with another sequence's."""
    copier = Copier(600 * 16)
    with copier.vmm.gathered():
        copier.out(0, 0, 100 * 16)
        for cell in range(200):
            copier.out((100 + cell) * 16, (100 + 2 * cell) * 16, 16)
    assert copier.counts() == (2, 1)
    rows = [copier.there.raw[(100 + 2 * cell) * 16 :][:16] for cell in range(200)]
    assert copier.here.raw[: 300 * 16] == copier.there.raw[: 100 * 16] + b"".join(rows)
    before = copier.there.raw
    ctypes.memset(copier.there, 0, 600 * 16)
    with copier.vmm.gathered():
        copier.back(0, 0, 100 * 16)
        for cell in range(200):
            copier.back((100 + 2 * cell) * 16, (100 + cell) * 16, 16)
    assert copier.counts() == (2, 1)
    for cell in range(200):
        at = (100 + 2 * cell) * 16
        assert copier.there.raw[at : at + 16] == before[at : at + 16]
        assert copier.there.raw[at + 16 : at + 32] == bytes(16), "the other sequence's"


@scene
def whole_tensors_are_copies_of_their_own() -> None:
    wide = 40 << 10
    copier = Copier(4 * wide)
    with copier.vmm.gathered():
        for layer in range(3):
            copier.out(layer * (wide + 12), layer * (wide + 4096), wide)
    assert copier.counts() == (3, 1)
    for layer in range(3):
        there = copier.there.raw[layer * (wide + 4096) :][:wide]
        assert copier.here.raw[layer * (wide + 12) :][:wide] == there


@scene
def large_states_are_waited_for_now_and_then() -> None:
    size = 80 << 20
    copier = Copier(size)
    with copier.vmm.gathered():
        copier.out(0, 0, size)
    assert copier.counts() == (3, 3), "32, 32 and 16 MiB"
    assert copier.here.raw == copier.there.raw
    with copier.vmm.gathered():
        for part in range(5):
            copier.back(part * (14 << 20) + 4096 * part, part * (14 << 20), 14 << 20)
    assert copier.counts() == (5, 2), "three of 14 MiB, and two"


@scene
def any_sequence_of_copies_ends_as_it_would_have() -> None:
    rng = random.Random(20240607)
    for _ in range(300):
        copier = Copier(4000)
        expected = bytearray(4000)
        at = to = 0
        with copier.vmm.gathered():
            while at < 3800 and to < 3800:
                n = rng.choice([8, 8, 8, 24, 100])
                at += rng.choice([0, 8, 8, 16, 40])
                to += rng.choice([0, 0, 8])
                if at + n > 4000 or to + n > 4000:
                    break
                assert copier.out(to, at, n, rng.choice([STREAM] * 9 + [77])) == 0
                expected[to : to + n] = copier.there.raw[at : at + n]
                at, to = at + n, to + n
        assert copier.here.raw == bytes(expected)


@scene
def going_backwards_or_far_is_a_copy_of_its_own() -> None:
    copier = Copier(4000)
    with copier.vmm.gathered():
        for at in (3000, 2000, 1000, 0, 500):
            copier.out(at, at, 100)
        copier.out(3900, 0, 100)
    for at in (3000, 2000, 1000, 0, 500):
        assert copier.here.raw[at : at + 100] == copier.there.raw[at : at + 100]
    assert copier.here.raw[3900:] == copier.there.raw[:100]


@scene
def what_is_copied_within_the_device_comes_after_what_was_asked_before() -> None:
    copier = Copier(300)
    ctypes.memset(copier.here, 7, 300)
    with copier.vmm.gathered():
        copier.back(0, 0, 100)
        there = ctypes.addressof(copier.there)
        assert copier.device.client.client_copy(there + 200, there, 100, ON_DEVICE, STREAM) == 0
    assert copier.there.raw[200:] == bytes([7]) * 100


@scene
def another_stream_and_another_direction_keep_their_order() -> None:
    copier = Copier(400)
    with copier.vmm.gathered():
        copier.out(0, 0, 100)
        copier.out(100, 100, 100, 77)
        assert copier.here.raw[:100] == copier.there.raw[:100], "streams do not wait for each other"
        copier.out(200, 0, 100)
        copier.back(300, 200, 100)
    assert copier.here.raw[:200] == copier.there.raw[:200]
    assert copier.there.raw[300:] == copier.there.raw[:100]


@scene
def regions_nest_and_other_threads_do_not_notice() -> None:
    copier = Copier(400)
    with copier.vmm.gathered():
        with copier.vmm.gathered():
            copier.out(0, 0, 100)
        assert copier.here.raw[:100] == bytes(100), "the outermost end waits"
        done: list[bool] = []

        def other() -> None:
            copier.out(100, 100, 100, 78)
            done.append(copier.here.raw[100:200] == copier.there.raw[100:200])

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert done == [True]
        assert copier.here.raw[:100] == bytes(100)
    assert copier.here.raw[:200] == copier.there.raw[:200]


@scene
def an_empty_region_waits_for_nobody() -> None:
    copier = Copier(100)
    with copier.vmm.gathered():
        pass
    assert copier.counts() == (0, 0)
    with copier.vmm.gathered():
        copier.device.client.client_wait(STREAM)
    assert copier.counts() == (0, 1), "somebody else's work on that stream"


def _four_pieces(copier: Copier) -> None:
    with copier.vmm.gathered():
        for at in (300, 200, 100, 0):
            assert copier.out(at, at, 50) == 0


@scene
def every_failure_is_told_at_the_end_and_only_there() -> None:
    for nth in range(1, 6):
        copier = Copier(400)
        copier.device.runtime.cudart_arm(nth)
        with pytest.raises(Internal, match="719"):
            _four_pieces(copier)
        copier.device.runtime.cudart_arm(0)
        copier.counts()
        with copier.vmm.gathered():
            copier.out(0, 0, 400)
        assert copier.here.raw == copier.there.raw, "the next one starts anew"
        assert copier.counts() == (1, 1)


@scene
def an_exception_inside_ends_the_region() -> None:
    copier = Copier(100)
    with contextlib.suppress(KeyError), copier.vmm.gathered():
        copier.out(0, 0, 100)
        raise KeyError
    assert copier.here.raw == copier.there.raw
    copier.out(0, 0, 50)
    assert copier.counts() == (2, 2)


if __name__ == "__main__":
    SCENES[sys.argv[1]]()
