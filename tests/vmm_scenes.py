"""What must hold of device memory that sleeps, on the stand-in and on a real GPU alike.

``python -m vmm_scenes NAME`` plays one scene in a process with the preload library.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable

import pytest
from vmm_device import KIB, MIB, Device, StubDevice, open_device

from vram_conductor.protocol.errors import ResourceExhausted

BLOCK = 8 * MIB

Scene = Callable[[Device], None]
SCENES: dict[str, Scene] = {}


def scene(play: Scene) -> Scene:
    """Register it by its name."""
    SCENES[play.__name__] = play
    return play


def noise(size: int, seed: int) -> bytes:
    """Bytes that nothing else has. Long ones are one block over and over, each time turned a byte
    further, so that none is like another and a gigabyte takes no minute."""
    block = random.Random(seed).randbytes(min(size, BLOCK))
    twice = memoryview(block * 2)
    turned = [twice[at : at + BLOCK] for at in range(-(-size // BLOCK))]
    return b"".join(turned)[:size] if len(turned) > 1 else block


def fill(device: Device, tag: int, *sizes: int) -> dict[int, bytes]:
    """Allocate and write: address → contents."""
    held: dict[int, bytes] = {}
    for index, size in enumerate(sizes):
        with device.vmm.region(tag):
            address = device.malloc(size)
        held[address] = noise(size, tag * 1000 + index)
        device.write(address, held[address])
    return held


def intact(device: Device, held: dict[int, bytes]) -> bool:
    return all(device.read(address, len(data)) == data for address, data in held.items())


def uses(device: Device, wanted: int) -> None:
    """So much device memory is taken."""
    assert abs(device.used_bytes() - wanted) <= device.slack_bytes, (device.used_bytes(), wanted)


def rounded(device: Device, *sizes: int) -> int:
    return sum(-(-size // device.unit) * device.unit for size in sizes)


def clear(device: Device, *helds: dict[int, bytes]) -> None:
    for held in helds:
        for address in held:
            assert device.free(address) == 0


@scene
def what_is_only_planned_lies_on_the_host(device: Device) -> None:
    vmm, tag = device.vmm, device.vmm.new_tag()
    before = device.used_bytes()
    with vmm.region(tag), vmm.on_host():
        addresses = [device.malloc(size) for size in (8 * MIB, 5000)]
    assert device.used_bytes() - before <= device.slack_bytes
    assert vmm.stat(tag).allocations == 0, "it cannot sleep, and need not"
    for at, address in enumerate(addresses):
        device.write(address, bytes([at]) * 5000)
    assert [device.read(address, 5000) for address in addresses] == [
        bytes([at]) * 5000 for at in range(2)
    ]
    with vmm.region(tag):
        mine = device.malloc(KIB)
    assert vmm.stat(tag).allocations == 1, "the region is left"
    for address in (*addresses, mine):
        assert device.free(address) == 0


@scene
def contents_come_back_at_the_same_addresses(device: Device) -> None:
    tag, sizes = device.vmm.new_tag(), (3 * MIB + 17, 1, 700 * KIB)
    held = fill(device, tag, *sizes)
    stat = device.vmm.stat(tag)
    assert stat.bytes == stat.mapped_bytes == rounded(device, *sizes)
    assert (stat.allocations, stat.backup_bytes) == (3, 0)
    used = device.used_bytes()
    device.vmm.back_up(tag)
    assert device.vmm.stat(tag).backup_bytes == sum(sizes)
    for _ in range(3):
        device.vmm.sleep(tag, keep=True)
        assert device.vmm.stat(tag).mapped_bytes == 0
        uses(device, used - rounded(device, *sizes))
        device.vmm.wake(tag)
        uses(device, used)
        assert intact(device, held)
    stat = device.vmm.stat(tag)
    assert stat.wake_map_ns > 0
    assert stat.wake_copy_ns > 0
    clear(device, held)
    assert device.vmm.stat(tag).bytes == 0
    uses(device, used - rounded(device, *sizes))


@scene
def sleeping_with_keep_makes_the_backup_that_is_missing(device: Device) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, 2 * MIB)
    device.vmm.sleep(tag, keep=True)
    assert device.vmm.stat(tag).backup_bytes == 2 * MIB
    # What came later is backed up at the next sleep; what is backed up is not copied again.
    device.vmm.wake(tag)
    held |= fill(device, tag, 5 * MIB)
    device.vmm.sleep(tag, keep=True)
    device.vmm.wake(tag)
    assert device.vmm.stat(tag).backup_bytes == 7 * MIB
    assert intact(device, held)
    clear(device, held)


@scene
def without_keep_only_the_addresses_stay(device: Device) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, 4 * MIB)
    device.vmm.sleep(tag, keep=False)
    device.vmm.wake(tag)
    assert device.vmm.stat(tag).backup_bytes == 0
    assert intact(device, {address: bytes(4 * MIB) for address in held})
    for address in held:
        held[address] = noise(4 * MIB, 77)
        device.write(address, held[address])
    assert intact(device, held)
    clear(device, held)


@scene
def other_tags_and_other_memory_are_untouched(device: Device) -> None:
    one, two = device.vmm.new_tag(), device.vmm.new_tag()
    first, second = fill(device, one, 2 * MIB, 3 * MIB), fill(device, two, 5 * MIB)
    plain = device.malloc(MIB)
    device.write(plain, noise(MIB, 5))
    device.vmm.sleep(one, keep=True)
    assert intact(device, second)
    assert device.read(plain, MIB) == noise(MIB, 5)
    device.vmm.sleep(two, keep=True)
    device.vmm.wake(one)
    assert intact(device, first)
    assert device.vmm.stat(two).mapped_bytes == 0
    device.vmm.wake(two)
    assert intact(device, second)
    assert device.free(plain) == 0
    clear(device, first, second)


@scene
def twice_is_as_good_as_once(device: Device) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, 2 * MIB, 64 * KIB)
    device.vmm.wake(tag)
    for keep in (True, False, True):
        device.vmm.sleep(tag, keep=True)
        device.vmm.sleep(tag, keep=keep)
        device.vmm.wake(tag)
        device.vmm.wake(tag)
        assert intact(device, held)
    device.vmm.back_up(tag)
    device.vmm.drop_backup(tag)
    device.vmm.drop_backup(tag)
    clear(device, held)


@scene
def memory_is_freed_awake_and_asleep(device: Device) -> None:
    before = device.used_bytes()
    for keep in (None, False, True):
        tag = device.vmm.new_tag()
        held = fill(device, tag, 2 * MIB, 3 * MIB)
        if keep is not None:
            device.vmm.sleep(tag, keep=keep)
        clear(device, held)
        assert device.vmm.stat(tag).allocations == 0
        assert device.vmm.stat(tag).backup_bytes == 0
        uses(device, before)
        # The tag's number may be used again.
        clear(device, fill(device, tag, MIB))


@scene
def one_of_two_is_freed_in_its_sleep(device: Device) -> None:
    tag = device.vmm.new_tag()
    held = fill(device, tag, 2 * MIB, 3 * MIB)
    gone = next(iter(held))
    device.vmm.sleep(tag, keep=True)
    assert device.free(gone) == 0
    del held[gone]
    device.vmm.wake(tag)
    assert intact(device, held)
    assert device.vmm.stat(tag).allocations == 1
    clear(device, held)


@scene
def what_is_allocated_later_sleeps_with_the_rest(device: Device) -> None:
    tag = device.vmm.new_tag()
    first = fill(device, tag, 3 * MIB)
    device.vmm.sleep(tag, keep=False)
    device.vmm.wake(tag)
    # As a buffer that is replaced by a larger one: the old one goes first.
    clear(device, first)
    plain = device.used_bytes()
    second = fill(device, tag, 5 * MIB)
    third = fill(device, tag, MIB)
    uses(device, plain + rounded(device, 5 * MIB, MIB))
    device.vmm.sleep(tag, keep=True)
    uses(device, plain)
    device.vmm.wake(tag)
    assert intact(device, {**second, **third})
    clear(device, second, third)


@scene
def a_tag_with_nothing_sleeps_and_wakes(device: Device) -> None:
    tag = device.vmm.new_tag()
    device.vmm.back_up(tag)
    device.vmm.sleep(tag, keep=True)
    device.vmm.wake(tag)
    device.vmm.drop_backup(tag)
    assert device.vmm.stat(tag).bytes == 0


@scene
def outside_of_regions_and_for_strangers_the_runtime_answers(device: Device) -> None:
    tag = device.vmm.new_tag()
    with device.vmm.region(tag):
        inner = device.malloc(100)
    outer = device.malloc(100)
    assert device.vmm.stat(tag).allocations == 1
    assert device.free(outer) == 0
    assert device.free(0) == 0
    assert device.free(inner + 16) != 0, "not an address that was handed out"
    assert device.free(inner) == 0
    with device.vmm.region(tag):
        assert device.free(device.malloc(0)) == 0
    assert device.vmm.stat(tag).allocations == 0


@scene
def sizes_are_rounded_up_to_the_unit(device: Device) -> None:
    unit = device.unit
    for size in (1, unit - 1, unit, unit + 1, 3 * unit - 1):
        tag = device.vmm.new_tag()
        held = fill(device, tag, size)
        assert device.vmm.stat(tag).bytes == rounded(device, size)
        assert next(iter(held)) % unit == 0 or unit == 64 * KIB
        device.vmm.sleep(tag, keep=True)
        assert device.vmm.stat(tag).backup_bytes == size
        device.vmm.wake(tag)
        assert intact(device, held)
        clear(device, held)
    for absurd in (2**64 - 1, 2**64 - unit, 2**63):
        with device.vmm.region(tag), pytest.raises(MemoryError):
            device.malloc(absurd)
    assert device.vmm.stat(tag).allocations == 0


@scene
def regions_nest_and_belong_to_their_thread(device: Device) -> None:
    one, two = device.vmm.new_tag(), device.vmm.new_tag()
    addresses: list[int] = []
    with device.vmm.region(one):
        with device.vmm.region(two):
            addresses.append(device.malloc(10))
        addresses.append(device.malloc(10))
        other = threading.Thread(target=lambda: addresses.append(device.malloc(10)))
        other.start()
        other.join()
    assert [device.vmm.stat(tag).allocations for tag in (one, two)] == [1, 1]
    assert [device.free(address) for address in addresses] == [0, 0, 0]


@scene
def two_threads_fill_two_tags(device: Device) -> None:
    tags = [device.vmm.new_tag() for _ in range(2)]
    helds: dict[int, dict[int, bytes]] = {}
    meeting = threading.Barrier(2)

    def work(tag: int) -> None:
        with device.vmm.region(tag):
            meeting.wait(30)
            held = {device.malloc(size): noise(size, size) for size in (MIB, 2 * MIB, 30 * KIB)}
        for address, data in held.items():
            device.write(address, data)
        helds[tag] = held
        for _ in range(5):
            device.vmm.sleep(tag, keep=True)
            device.vmm.wake(tag)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in tags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for tag in tags:
        assert device.vmm.stat(tag).allocations == 3
        assert intact(device, helds[tag])
        clear(device, helds[tag])


@scene
def what_others_took_meanwhile_is_seen_before_the_wake(device: Device) -> None:
    tag, hog = device.vmm.new_tag(), device.vmm.new_tag()
    held = fill(device, tag, 8 * MIB, 4 * MIB)
    device.vmm.sleep(tag, keep=True)
    room = device.vmm.free_bytes()
    with device.vmm.region(hog):
        taken = device.malloc(room - 6 * MIB)
    with pytest.raises(ResourceExhausted) as caught:
        device.vmm.wake(tag)
    assert caught.value.reason == "wake_failed"
    assert caught.value.retryable
    assert caught.value.details["need_bytes"] == rounded(device, 8 * MIB, 4 * MIB)
    assert caught.value.details["free_bytes"] < caught.value.details["need_bytes"]
    assert device.vmm.stat(tag).mapped_bytes == 0
    assert device.free(taken) == 0
    device.vmm.wake(tag)
    assert intact(device, held)
    clear(device, held)


@scene
def no_move_spoils_a_graph_that_another_thread_records(device: Device) -> None:
    vmm, errors = device.vmm, list[BaseException]()

    def moves() -> None:
        try:
            tag = vmm.new_tag()
            with vmm.region(tag):
                mine = [device.malloc(MIB), device.malloc(5000)]
            with vmm.on_host():
                planned = device.malloc(MIB)
            vmm.back_up(tag)
            vmm.sleep(tag, keep=True)
            vmm.wake(tag)
            vmm.drop_backup(tag)
            vmm.sleep(tag, keep=False)
            vmm.wake(tag)
            assert vmm.free_bytes() > 0
            device.pin()
            assert [device.free(address) for address in (*mine, planned)] == [0, 0, 0]
        except BaseException as error:
            errors.append(error)

    moves()  # what is loaded at the first use is there
    with device.recording():
        thread = threading.Thread(target=moves)
        thread.start()
        thread.join(60)
    assert not errors, errors


def main() -> None:
    device = open_device()
    SCENES[sys.argv[1]](device)
    if isinstance(device, StubDevice):
        assert not any(device.counts().held().values()), device.counts().held()
        assert device.runtime.cudart_count() == 0


if __name__ == "__main__":
    main()
