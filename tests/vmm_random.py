"""Random moves of sleeping memory against a model of it, with faults and a full device.

``python -m vmm_random machine`` plays sequences that hypothesis chooses in one thread,
``python -m vmm_random threads`` lets three threads meet. On the stand-in.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vmm_device import KIB, StubDevice
from vmm_scenes import noise, rounded

from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, ResourceExhausted

DEVICE_BYTES, HOST_BYTES = 1536 * KIB, 1200 * KIB
LAUNCH_FAILED = 719
device = StubDevice()


def attempt(move: Callable[[], object], nth: int = 0) -> ConductorError | MemoryError | None:
    """Make a move whose ``nth`` driver call fails (0: none); what it raised."""
    device.arm(nth, code=LAUNCH_FAILED)
    try:
        move()
    except (ConductorError, MemoryError) as error:
        return error
    finally:
        device.arm(0)
    return None


@dataclass
class Block:
    """What must be in it; None: anything."""

    size: int
    contents: bytes | None
    backup: bytes | None = None
    backed_up: bool = False


@dataclass
class Model:
    """A tag."""

    tag: int
    blocks: dict[int, Block] = field(default_factory=dict)
    asleep: bool = False
    kept: bool = False

    def need(self) -> int:
        return rounded(device, *[block.size for block in self.blocks.values()])

    def whole(self) -> bool:
        """Whether all of it has a backup."""
        return all(block.backed_up for block in self.blocks.values())

    def back_up(self) -> None:
        for block in self.blocks.values():
            if not block.backed_up:
                block.backed_up, block.backup = True, block.contents

    def drop(self) -> None:
        for block in self.blocks.values():
            block.backed_up, block.backup = False, None

    def wake(self) -> None:
        for block in self.blocks.values():
            block.contents = block.backup if self.kept else None
        self.asleep = self.kept = False


class Machine(RuleBasedStateMachine):
    """Three tags on a device that does not hold them all."""

    def __init__(self) -> None:
        super().__init__()
        device.caps(DEVICE_BYTES, HOST_BYTES)
        self.models = [Model(device.vmm.new_tag()) for _ in range(3)]
        self.seed = 0

    @property
    def used(self) -> int:
        return sum(model.need() for model in self.models if not model.asleep)

    @property
    def pinned(self) -> int:
        return sum(
            block.size
            for model in self.models
            for block in model.blocks.values()
            if block.backed_up
        )

    @rule(which=st.integers(0, 2), size=st.integers(1, 300 * KIB))
    def allocate(self, which: int, size: int) -> None:
        model = self.models[which]
        if model.asleep:
            return
        fits = self.used + rounded(device, size) <= DEVICE_BYTES
        addresses: list[int] = []
        with device.vmm.region(model.tag):
            error = attempt(lambda: addresses.append(device.malloc(size)))
        assert fits == (error is None)
        if error is not None:
            assert error.args == (2,)
            return
        (address,) = addresses
        self.seed += 1
        model.blocks[address] = Block(size, noise(size, self.seed))
        device.write(address, noise(size, self.seed))

    @rule(which=st.integers(0, 2), pick=st.integers(0, 99))
    def write(self, which: int, pick: int) -> None:
        model = self.models[which]
        if model.asleep or not model.blocks:
            return
        address = list(model.blocks)[pick % len(model.blocks)]
        self.seed += 1
        block = model.blocks[address]
        block.contents = noise(block.size, self.seed)
        device.write(address, block.contents)

    @rule(which=st.integers(0, 2), pick=st.integers(0, 99), nth=st.integers(0, 8))
    def free(self, which: int, pick: int, nth: int) -> None:
        model = self.models[which]
        if not model.blocks:
            return
        address = list(model.blocks)[pick % len(model.blocks)]
        device.arm(nth, code=LAUNCH_FAILED)
        code = device.free(address)
        device.arm(0)
        if code:
            assert code == LAUNCH_FAILED
            assert nth
            assert device.free(address) == 0, "the second try"
        del model.blocks[address]
        if not model.blocks:
            model.asleep = model.kept = False

    @rule(which=st.integers(0, 2))
    def back_up(self, which: int) -> None:
        model = self.models[which]
        if model.asleep and not model.whole():
            self.refused("backup_gone", lambda: device.vmm.back_up(model.tag))
            return
        more = sum(block.size for block in model.blocks.values() if not block.backed_up)
        if self.pinned + more > HOST_BYTES:
            self.refused("backup_failed", lambda: device.vmm.back_up(model.tag))
            return
        device.vmm.back_up(model.tag)
        model.back_up()

    @rule(which=st.integers(0, 2))
    def drop_backup(self, which: int) -> None:
        device.vmm.drop_backup(self.models[which].tag)
        self.models[which].drop()

    @rule(which=st.integers(0, 2), keep=st.booleans(), nth=st.integers(0, 30))
    def sleep(self, which: int, keep: bool, nth: int) -> None:
        model = self.models[which]
        if model.asleep or not model.blocks:
            device.vmm.sleep(model.tag, keep)
            return
        more = sum(block.size for block in model.blocks.values() if not block.backed_up)
        poor = keep and self.pinned + more > HOST_BYTES
        error = attempt(lambda: device.vmm.sleep(model.tag, keep), nth)
        if error is None:
            assert not poor
            if keep:
                model.back_up()
            model.asleep, model.kept = True, keep
            return
        assert nth or poor
        assert isinstance(error, ConductorError)
        assert error.reason == "sleep_failed" or (keep and error.reason == "backup_failed")
        if error.reason == "sleep_failed":
            self.half_way(model, keep)

    @rule(which=st.integers(0, 2), nth=st.integers(0, 30))
    def wake(self, which: int, nth: int) -> None:
        model = self.models[which]
        if not model.asleep:
            device.vmm.wake(model.tag)
            return
        fits = self.used + model.need() <= DEVICE_BYTES
        lost = model.kept and not model.whole()
        error = attempt(lambda: device.vmm.wake(model.tag), nth)
        if error is None:
            assert fits
            assert not lost
            model.wake()
        elif isinstance(error, FailedPrecondition):
            assert lost
        elif isinstance(error, ResourceExhausted):
            assert not fits
            assert error.details["need_bytes"] == model.need()
        else:
            assert nth
            assert isinstance(error, ConductorError)
            assert error.reason == "wake_failed"

    def refused(self, reason: str, move: Callable[[], object]) -> None:
        before = device.counts().held()
        error = attempt(move)
        assert isinstance(error, ConductorError)
        assert error.reason == reason
        assert device.counts().held() == before

    def half_way(self, model: Model, keep: bool) -> None:
        """A sleep that failed: it is awake again, and what had gone is back from its backup."""
        if keep and device.vmm.stat(model.tag).backup_bytes == sum(
            block.size for block in model.blocks.values()
        ):
            model.back_up()
        for address, block in model.blocks.items():
            found = device.read(address, block.size)
            if keep and None not in (block.contents, block.backup):
                assert found in (block.contents, block.backup)
                block.contents = found
            elif not keep and found != block.contents:
                block.contents = None

    @precondition(lambda self: any(model.blocks for model in self.models))
    @invariant()
    def contents_are_as_they_were(self) -> None:
        for model in self.models:
            for address, block in model.blocks.items():
                if not model.asleep and block.contents is not None:
                    assert device.read(address, block.size) == block.contents

    @invariant()
    def all_is_counted(self) -> None:
        for model in self.models:
            stat = device.vmm.stat(model.tag)
            assert stat.allocations == len(model.blocks)
            assert stat.bytes == model.need()
            assert stat.mapped_bytes == (0 if model.asleep else model.need())
        counts = device.counts()
        assert counts.used_bytes == self.used
        assert counts.host_bytes == self.pinned
        assert counts.ranges == sum(len(model.blocks) for model in self.models)

    def teardown(self) -> None:
        device.arm(0)
        for model in self.models:
            for address in model.blocks:
                assert device.free(address) == 0
        assert not any(device.counts().held().values()), device.counts().held()


def machine() -> None:
    steps = settings(max_examples=300, stateful_step_count=40, deadline=None, derandomize=True)
    run_state_machine_as_test(Machine, settings=steps)


# --- threads ----------------------------------------------------------------------------------

MOVES_EACH = 1500


def threads() -> None:
    seed = int(os.environ.get("VRAM_CONDUCTOR_TEST_SEED", "20240607"))
    device.caps(DEVICE_BYTES, HOST_BYTES)
    device.stub.stub_pause(60)
    shared = Model(device.vmm.new_tag())
    sizes = (90 * KIB, 64 * KIB)
    with device.vmm.region(shared.tag):
        for size in sizes:
            shared.blocks[device.malloc(size)] = Block(size, noise(size, size))
    for address, block in shared.blocks.items():
        device.write(address, block.contents or b"")
    device.vmm.back_up(shared.tag)
    problems: list[str] = []

    def guarded(number: int) -> None:
        try:
            wander(random.Random(seed + number), shared.tag)
        except BaseException as error:
            problems.append(f"thread {number}: {error!r}")
            raise

    workers = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
        assert not worker.is_alive(), "it hangs"
    assert not problems, problems
    device.vmm.wake(shared.tag)
    for address, block in shared.blocks.items():
        assert device.read(address, block.size) == block.contents
        assert device.free(address) == 0


def wander(draw: random.Random, shared: int) -> None:
    """Moves of a tag of its own, whose contents are checked, and of one that all share."""
    own = Model(device.vmm.new_tag())
    for _ in range(MOVES_EACH):
        move = draw.randrange(8)
        try:
            if move == 0 and not own.asleep:
                size = draw.randrange(1, 150 * KIB)
                with device.vmm.region(own.tag):
                    address = device.malloc(size)
                own.blocks[address] = Block(size, noise(size, size))
                device.write(address, noise(size, size))
            elif move == 1 and own.blocks:
                address = draw.choice(list(own.blocks))
                del own.blocks[address]
                assert device.free(address) == 0
                own.asleep = own.asleep and bool(own.blocks)
            elif move in (2, 3) and own.blocks:
                device.vmm.sleep(own.tag, keep=True)
                own.asleep = True
            elif move in (4, 5):
                device.vmm.wake(own.tag)
                own.asleep = False
            elif move == 6:
                device.vmm.sleep(shared, keep=True)
                assert device.vmm.stat(shared).bytes
            else:
                device.vmm.wake(shared)
        except MemoryError:
            pass
        except ConductorError as error:
            if error.reason not in ("wake_failed", "backup_failed"):
                raise
        if not own.asleep:
            for address, block in own.blocks.items():
                assert device.read(address, block.size) == block.contents
    for address in own.blocks:
        assert device.free(address) == 0


def main() -> None:
    {"machine": machine, "threads": threads}[sys.argv[1]]()
    assert not any(device.counts().held().values()), device.counts().held()


if __name__ == "__main__":
    main()
