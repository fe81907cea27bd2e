"""The sampler of a serving worker: drift, a restart, and NVML that fails for once."""

from __future__ import annotations

import pytest

from vram_conductor.protocol.errors import Unavailable
from vram_conductor.protocol.values import DeviceInfo, Memory
from vram_conductor.worker.gauge import Gauge
from vram_conductor.worker.reporter import FRESH_NS, Reporter
from vram_conductor.worker.unexplained import DRIFT_BYTES, RECYCLE_NS, Unexplained

MIB, GIB = 1 << 20, 1 << 30


class Gpu:
    """A device whose memory a test sets."""

    def __init__(self) -> None:
        self.told_bytes: int | None = 600 * MIB
        self.fail = ""

    def info(self) -> DeviceInfo:
        return DeviceInfo(device="cuda:0", kind="cuda", name="Toy", total_bytes=8 * GIB)

    def sample(self, own_bytes: int) -> Memory:
        if self.fail:
            raise Unavailable(self.fail, "NVML says no")
        used = self.told_bytes or own_bytes
        return Memory(used_bytes=used, own_bytes=used, foreign_bytes=0)


class Bench:
    def __init__(self) -> None:
        self.gpu = Gpu()
        self.base = 600 * MIB
        self.now_ns = 0
        self.idle = True
        self.pinned = 0
        self.gauge = Gauge(
            self.gpu,
            Unexplained(recycle_age_ns=0),
            self.grow,
            lambda: self.idle,
            lambda: self.pinned,
            lambda: self.now_ns,
        )

    def grow(self, size: int) -> None:
        self.base += size

    def sample(self) -> Memory:
        return self.gauge.sample(self.base)


def test_late_kernels_become_part_of_the_base() -> None:
    bench = Bench()
    bench.sample()
    bench.gpu.told_bytes = 604 * MIB
    bench.sample()
    assert bench.base == 604 * MIB
    assert not bench.gauge.worn


def test_tables_of_pinned_memory_are_base_too_and_go_with_it() -> None:
    bench = Bench()
    bench.pinned = 16 * GIB
    bench.gpu.told_bytes = (600 + 48) * MIB
    bench.sample()
    assert bench.base == (600 + 48) * MIB
    bench.gpu.told_bytes = 604 * MIB
    bench.sample()
    assert bench.base == 604 * MIB


def test_memory_that_stays_after_an_unload_wears_the_process_out() -> None:
    bench = Bench()
    bench.gpu.told_bytes = 3 * GIB
    lost = 3 * GIB - 600 * MIB - DRIFT_BYTES
    memory = bench.sample()
    assert memory.foreign_bytes == lost, "nobody is promised what is not free"
    assert memory.own_bytes + memory.foreign_bytes == memory.used_bytes == 3 * GIB
    bench.idle = False
    bench.now_ns = RECYCLE_NS
    bench.sample()
    assert not bench.gauge.worn, "a job runs"
    bench.idle = True
    bench.sample()
    bench.now_ns = 2 * RECYCLE_NS
    bench.sample()
    assert bench.gauge.worn
    assert bench.base == 600 * MIB + DRIFT_BYTES


def test_a_sample_that_fails_is_the_last_one_and_as_old_as_it_is() -> None:
    bench = Bench()
    bench.gpu.fail = "nvml_error"
    with pytest.raises(Unavailable):
        bench.sample()
    bench.gpu.fail = ""
    assert bench.sample().age_ms == 0
    bench.gpu.fail, bench.now_ns = "nvml_error", 7_000_000_000
    assert bench.sample().age_ms == 7000
    bench.gpu.fail = "gpu_lost"
    with pytest.raises(Unavailable):
        bench.sample()


def test_an_estimate_hurries_a_report_unless_the_last_is_fresh() -> None:
    reporter = Reporter(2000)
    assert reporter.due(1, 0)
    reporter.hurry(FRESH_NS)
    assert not reporter.due(1, FRESH_NS)
    reporter.hurry(FRESH_NS + 1)
    assert reporter.due(1, FRESH_NS + 1)
    assert reporter.next_ns(1, FRESH_NS + 2) == FRESH_NS + 1 + 2_000_000_000
