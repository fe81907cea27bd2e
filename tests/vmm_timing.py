"""How fast memory sleeps and wakes on this GPU, beside the rate of pinned copies in the same run.

``python -m vmm_timing`` prints one JSON object per size and one for the copies. Runs in a process
with the preload library.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence

from vmm_device import MIB, CudaDevice

SIZES_MIB = (64, 196, 418, 664, 1024)
TIMES = 7
MANY = 220
REST_S = 0.02
SMALL_PIECES, SMALL_BYTES = 48, 192 << 10
PER_THREAD = 2
"""The runtime's name for the calling thread's own stream."""


def timed_s(work: Callable[[], object]) -> float:
    """In seconds."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def best_s(work: Callable[[], object]) -> float:
    """Of several runs, in seconds."""
    return min(timed_s(work) for _ in range(TIMES))


def copy_rates(device: CudaDevice, size: int) -> dict[str, float]:
    """GB/s in and out, between one block of pinned memory and one of plain device memory."""
    host = ctypes.c_void_p()
    runtime = device.runtime
    runtime.cudaHostAlloc.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_size_t,
        ctypes.c_uint,
    ]
    runtime.cudaFreeHost.argtypes = [ctypes.c_void_p]
    assert not runtime.cudaHostAlloc(host, size, 0)
    address = device.malloc(size)
    into = best_s(lambda: runtime.cudaMemcpy(address, host, size, 1))
    out = best_s(lambda: runtime.cudaMemcpy(host, address, size, 2))
    assert device.free(address) == 0
    assert not runtime.cudaFreeHost(host)
    return {"in_gb_s": size / into / 1e9, "out_gb_s": size / out / 1e9}


def moves(device: CudaDevice, blocks: Sequence[int]) -> dict[str, float]:
    """Milliseconds of every move of a tag with such blocks, in bytes; the best of several.

    ``wake``: at once after its sleep, as long as the driver still clears what was given back, with
    the engine that also copies. ``rested``: some time after it.
    """
    vmm, tag, size = device.vmm, device.vmm.new_tag(), sum(blocks)
    with vmm.region(tag):
        addresses = [device.malloc(block) for block in blocks]
    begun = time.perf_counter()
    vmm.back_up(tag)
    backed_up = time.perf_counter() - begun
    names = ("sleep", "wake", "map", "copy", "rested", "sleep_empty", "wake_empty")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(TIMES):
        found["sleep"].append(timed_s(lambda: vmm.sleep(tag, keep=True)))
        found["wake"].append(timed_s(lambda: vmm.wake(tag)))
        stat = vmm.stat(tag)
        found["map"].append(stat.wake_map_ns / 1e9)
        found["copy"].append(stat.wake_copy_ns / 1e9)
        vmm.sleep(tag, keep=True)
        time.sleep(REST_S)
        found["rested"].append(timed_s(lambda: vmm.wake(tag)))
    for _ in range(TIMES):
        found["sleep_empty"].append(timed_s(lambda: vmm.sleep(tag, keep=False)))
        found["wake_empty"].append(timed_s(lambda: vmm.wake(tag)))
    assert not any(device.free(address) for address in addresses)
    best = {f"{name}_ms": round(1e3 * min(times), 3) for name, times in found.items()}
    return {
        "mib": size // MIB,
        "blocks": len(blocks),
        "back_up_ms": round(1e3 * backed_up, 3),
        "pin_gb_s": round(size / backed_up / 1e9, 2),
        **best,
        "wake_gb_s": round(size / min(found["wake"]) / 1e9, 2),
        "rested_gb_s": round(size / min(found["rested"]) / 1e9, 2),
    }


def small_copies_s(device: CudaDevice, host: ctypes.c_void_p, address: int) -> float:
    """As for a small conversation's KV: pieces of a few hundred KiB, waited for together."""
    stream, runtime = ctypes.c_void_p(PER_THREAD), device.runtime
    begun = time.perf_counter()
    for at in range(0, SMALL_PIECES * SMALL_BYTES, SMALL_BYTES):
        place = ctypes.c_void_p((host.value or 0) + at)
        assert not runtime.cudaMemcpyAsync(address + at, place, SMALL_BYTES, 1, stream)
    assert not runtime.cudaStreamSynchronize(stream)
    return time.perf_counter() - begun


def beside(device: CudaDevice, size: int) -> dict[str, float]:
    """Small copies while a block of ``size`` bytes wakes, beside the same ones alone."""
    vmm, tag, runtime, host = device.vmm, device.vmm.new_tag(), device.runtime, ctypes.c_void_p()
    void, length = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaMemcpyAsync.argtypes = [void, void, length, ctypes.c_int, void]
    runtime.cudaStreamSynchronize.argtypes = [void]
    assert not runtime.cudaHostAlloc(host, SMALL_PIECES * SMALL_BYTES, 0)
    address = device.malloc(SMALL_PIECES * SMALL_BYTES)
    with vmm.region(tag):
        block = device.malloc(size)
    vmm.back_up(tag)
    alone_s = best_s(lambda: small_copies_s(device, host, address))
    together, wakes = [], []
    for _ in range(TIMES):
        vmm.sleep(tag, keep=True)
        begun = time.perf_counter()
        thread = threading.Thread(target=lambda: vmm.wake(tag))
        thread.start()
        time.sleep(0.002)  # memory is mapped by then, and copies are under way
        together.append(small_copies_s(device, host, address))
        thread.join()
        wakes.append(time.perf_counter() - begun)
    assert device.free(block) == device.free(address) == 0
    assert not runtime.cudaFreeHost(host)
    return {
        "beside_mib": size // MIB,
        "wake_ms": round(1e3 * min(wakes), 3),
        "small_alone_ms": round(1e3 * alone_s, 3),
        "small_beside_ms": round(1e3 * min(together), 3),
    }


def main() -> None:
    device = CudaDevice()
    rates = copy_rates(device, 512 * MIB)
    sys.stdout.write(json.dumps({"pinned": rates}) + "\n")
    # A model's weights are one block; many small ones are the worst that there could be.
    for blocks in (*([mib * MIB] for mib in SIZES_MIB), [3 * MIB] * MANY):
        row = moves(device, blocks)
        for name in ("wake", "rested"):
            row[f"{name}_percent"] = round(100 * row[f"{name}_gb_s"] / rates["in_gb_s"], 1)
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.write(json.dumps(beside(device, 664 * MIB)) + "\n")


if __name__ == "__main__":
    main()
