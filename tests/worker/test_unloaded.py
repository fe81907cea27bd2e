"""What a load takes and an unload gives back, against what the device says: core and gauge."""

from __future__ import annotations

import pytest
from core_driver import Driver
from fake_engine import FakeDevice, ModelSpec

from vram_conductor.protocol.values import DeviceInfo, Memory
from vram_conductor.worker.gauge import Gauge, watch
from vram_conductor.worker.growth import LATE_BYTES, STEP_BYTES
from vram_conductor.worker.unexplained import Unexplained

MODELS = [ModelSpec("one", scratch_bytes=12), ModelSpec("two", weights_bytes=300)]
BASE = 7
SECOND = 1_000_000_000


class Nvml:
    """Tells what the fake device has allocated for this process, and what it lost."""

    def __init__(self, device: FakeDevice, *, tells: bool) -> None:
        self.device = device
        self.tells = tells
        self.lost_bytes = 0
        self.told_bytes: int | None = None

    def info(self) -> DeviceInfo:
        return DeviceInfo(device="cuda:0", kind="cuda", name="Toy", total_bytes=1 << 20)

    def sample(self, own_bytes: int) -> Memory:
        own = BASE + self.device.allocated_bytes + self.lost_bytes
        used = own + self.device.foreign_bytes
        self.told_bytes = own if self.tells else None
        counted = own if self.tells else min(own_bytes, used)
        return Memory(used_bytes=used, own_bytes=counted, foreign_bytes=used - counted)


class Desk:
    def __init__(self, *, tells: bool) -> None:
        self.driver = Driver(MODELS, base_bytes=BASE, sleepable=True)
        self.nvml = Nvml(self.driver.device, tells=tells)
        self.now_ns = 0
        core = self.driver.core
        self.gauge = Gauge(
            self.nvml,
            Unexplained(drift_bytes=20, recycle_bytes=100, recycle_ns=SECOND, recycle_age_ns=0),
            lambda size: None,
            lambda: not len(core.jobs),
            lambda: 0,
            lambda: self.now_ns,
        )

    def sample(self) -> Memory:
        self.now_ns += SECOND
        return self.gauge.sample(self.driver.core.report().own_bytes)


@pytest.fixture(params=[True, False], ids=["by process", "by difference"])
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(tells=request.param)


def test_loads_and_unloads_leave_nothing(desk: Desk) -> None:
    for _ in range(3):
        for agent, model in (("a", "one"), ("b", "two")):
            desk.driver.load(agent, model)
            desk.driver.finish(desk.driver.run(agent, prompt="abcd", max_tokens=5))
            memory = desk.sample()
            assert memory.foreign_bytes == 0
            assert memory.own_bytes == desk.driver.core.report().own_bytes
        for agent in "ab":
            desk.driver.unload(agent)
            assert desk.sample().foreign_bytes == 0
    assert not desk.gauge.worn


def test_unloaded_with_memory_still_taken(desk: Desk) -> None:
    """The rest is promised to nobody, and where it stays, a new process takes over."""
    desk.driver.load("a", "one")
    desk.driver.load("b", "two")
    desk.driver.finish(desk.driver.run("a", prompt="abcd", max_tokens=5))
    assert desk.sample().foreign_bytes == 0
    desk.driver.unload("b")
    desk.nvml.lost_bytes = 300
    memory = desk.sample()
    assert memory.foreign_bytes >= 300 - 20
    assert not desk.gauge.worn, "it may be slow"
    op = desk.driver.run("a", prompt="abcd", max_tokens=5)
    desk.driver.step()
    desk.sample()
    desk.sample()
    assert not desk.gauge.worn, "a job runs"
    desk.driver.finish(op)
    desk.sample()
    desk.sample()
    assert desk.gauge.worn


def test_others_that_come_after_an_unload_are_not_held_against_us(desk: Desk) -> None:
    desk.driver.load("a", "one")
    desk.sample()
    desk.driver.unload("a")
    desk.sample()
    desk.driver.device.foreign_bytes = 5000
    for _ in range(3):
        assert desk.sample().foreign_bytes == 5000
    assert not desk.gauge.worn


def test_the_workers_gauge_grows_its_base() -> None:
    driver = Driver(MODELS, base_bytes=BASE, sleepable=True)
    core = driver.core
    nvml = Nvml(driver.device, tells=True)
    gauge = watch(nvml, core.residency, core.jobs, lambda: 0)
    nvml.lost_bytes = 5
    before = core.revision
    gauge.sample(core.report().own_bytes)
    assert core.revision > before
    assert core.residency.base_bytes == BASE + LATE_BYTES, "it was promised already"
    assert core.report().lines[0].bytes == BASE + 5
    assert str(LATE_BYTES - 5) in core.report().lines[0].detail
    assert gauge.sample(core.report().own_bytes).foreign_bytes == 0
    nvml.lost_bytes = LATE_BYTES
    gauge.sample(core.report().own_bytes)
    assert core.report().own_bytes == BASE + LATE_BYTES
    assert core.residency.base_bytes == BASE + LATE_BYTES + STEP_BYTES
    assert core.residency.resident_bytes() == BASE + LATE_BYTES + STEP_BYTES
