"""Memory of a cpu device: the formula, container limits, the live sampler."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.worker.memory import (
    CpuSampler,
    HostMemory,
    cgroup_paths,
    cpu_memory,
    host_memory,
    limited,
    read_cgroup,
)

GIB = 1 << 30


def sample(used: int, *, process: int = 0, own: int = 0) -> tuple[int, int, int]:
    memory = cpu_memory(
        HostMemory(16 * GIB, 16 * GIB - used),
        capacity_bytes=8 * GIB,
        host_cap_bytes=2 * GIB,
        process_bytes=process,
        own_bytes=own,
    )
    return memory.used_bytes, memory.own_bytes, memory.foreign_bytes


def test_others_within_their_share_are_not_foreign() -> None:
    assert sample(6 * GIB) == (0, 0, 0)
    assert sample(6 * GIB + 5) == (5, 0, 5)


def test_own_use_is_not_foreign() -> None:
    assert sample(15 * GIB, process=9 * GIB, own=7 * GIB) == (7 * GIB, 7 * GIB, 0)
    assert sample(15 * GIB, process=8 * GIB, own=7 * GIB) == (8 * GIB, 7 * GIB, GIB)


def test_a_process_that_seems_larger_than_all_use_gives_no_negative() -> None:
    assert sample(GIB, process=3 * GIB) == (0, 0, 0)


SIZES = st.integers(0, 1 << 45)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_the_identity_holds_for_all_numbers(
    total: int, available: int, capacity: int, host_cap: int, process: int, own: int
) -> None:
    memory = cpu_memory(
        HostMemory(total, available),
        capacity_bytes=capacity,
        host_cap_bytes=host_cap,
        process_bytes=process,
        own_bytes=own,
    )
    assert memory.foreign_bytes >= 0
    assert memory.used_bytes == memory.own_bytes + memory.foreign_bytes
    grown = cpu_memory(
        HostMemory(total, max(0, available - GIB)),
        capacity_bytes=capacity,
        host_cap_bytes=host_cap,
        process_bytes=process,
        own_bytes=own,
    )
    assert grown.foreign_bytes >= memory.foreign_bytes


def test_a_container_limit_narrows_the_machine() -> None:
    host = HostMemory(64 * GIB, 60 * GIB)
    assert limited(host, 100 * GIB, 0, 0) == host
    assert limited(host, 8 * GIB, 3 * GIB, GIB) == HostMemory(8 * GIB, 6 * GIB)
    assert limited(host, 8 * GIB, 9 * GIB, 0) == HostMemory(8 * GIB, 0)
    assert limited(HostMemory(64 * GIB, GIB), 8 * GIB, 0, 0) == HostMemory(8 * GIB, GIB)


def test_cgroup_lines() -> None:
    text = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/c\nnonsense\n3:cpu:/x\n"
    assert [str(path) for _, path in cgroup_paths(text)] == ["/a/b", "/c"]


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    host = HostMemory(64 * GIB, 60 * GIB)
    inner = tmp_path / "outer" / "inner"
    write(inner, memory__max="max\n", memory__current=f"{GIB}\n")
    write(
        tmp_path / "outer",
        memory__max=f"{8 * GIB}\n",
        memory__current=f"{3 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB}\nfile 9\n",
    )
    assert read_cgroup(host, tmp_path, "0::/outer/inner\n") == HostMemory(8 * GIB, 6 * GIB)
    assert read_cgroup(host, tmp_path, "0::/\n") == host


def test_cgroup_v1_in_a_container_that_sees_its_own_as_the_root(tmp_path: Path) -> None:
    host = HostMemory(64 * GIB, 60 * GIB)
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=str(4 * GIB),
        memory__usage_in_bytes=str(2 * GIB),
        memory__stat=f"total_inactive_file {GIB}\n",
    )
    assert read_cgroup(host, tmp_path, "4:memory:/docker/abc\n") == HostMemory(4 * GIB, 3 * GIB)
    write(tmp_path / "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    assert read_cgroup(host, tmp_path, "4:memory:/docker/abc\n") == host


def test_the_machine_can_be_read() -> None:
    host = host_memory()
    assert 0 < host.available_bytes <= host.total_bytes
    assert host.total_bytes > 100 << 20


def test_sampler_refuses_more_than_the_machine_has() -> None:
    def host() -> HostMemory:
        return HostMemory(16 * GIB, 10 * GIB)

    with pytest.raises(OutOfRange) as caught:
        CpuSampler("cpu", 15 * GIB, 2 * GIB, lambda: 0, host)
    assert caught.value.reason == "capacity_beyond_memory"
    assert caught.value.details["total_bytes"] == 16 * GIB
    with pytest.raises(OutOfRange):
        CpuSampler("cpu", 0, 16 * GIB, lambda: 0, host)
    rest = CpuSampler("cpu", 0, 2 * GIB, lambda: 0, host)
    assert rest.capacity_bytes == 14 * GIB
    assert rest.info().total_bytes == 14 * GIB
    assert rest.info().kind == "cpu"


def test_sampler_knows_its_own_memory_from_others() -> None:
    """What this process takes must not look like somebody else's."""
    total = 64 * GIB
    taken = 0

    def host() -> HostMemory:
        return HostMemory(total, total - taken)

    # All of the machine is the device's, so every byte of others counts.
    sampler = CpuSampler("cpu", total - GIB, GIB, lambda: 0, host)
    before = sampler._process.memory_info()
    # A mapping of its own: an array may lie in memory that earlier tests gave back to malloc.
    mine = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mine.write(b"\1" * (64 << 20))
    after = sampler._process.memory_info()
    assert (after.rss - after.shared) - (before.rss - before.shared) >= 60 << 20
    taken = after.rss - after.shared
    assert sampler.sample(own_bytes=7).foreign_bytes < 4 << 20
    taken += GIB
    assert sampler.sample(own_bytes=7).foreign_bytes == pytest.approx(GIB, abs=4 << 20)
    assert sampler.sample(own_bytes=7).own_bytes == 7
    mine.close()
