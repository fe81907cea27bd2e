"""How fast memory sleeps and wakes on this GPU, beside the rate of pinned copies in the same run.

``python -m vmm_timing sizes`` prints one JSON object per size and one for the copies,
``python -m vmm_timing pieces`` one per size of the pieces that a wake copies. Runs in a process
with the preload library.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median

from vmm_device import MIB, CudaDevice

SIZES_MIB = (64, 196, 418, 664, 1024)
TIMES = 7
MANY = 220
REST_S = 0.02
SMALL_PIECES, SMALL_BYTES = 48, 192 << 10
PIECES_MIB = (4, 8, 16, 32, 64, 0)
"""0: everything at once."""

MODEL = 664 * MIB
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


class Small:
    """As a small conversation's KV comes back: pieces of a few hundred KiB, waited for together."""

    def __init__(self, device: CudaDevice) -> None:
        void, length = ctypes.c_void_p, ctypes.c_size_t
        self.device, self.host = device, void()
        for library in (device.runtime, device.calls):
            library.cudaMemcpyAsync.argtypes = [void, void, length, ctypes.c_int, void]
            library.cudaStreamSynchronize.argtypes = [void]
        device.runtime.cudaHostAlloc.argtypes = [ctypes.POINTER(void), length, ctypes.c_uint]
        device.runtime.cudaFreeHost.argtypes = [void]
        assert not device.runtime.cudaHostAlloc(self.host, SMALL_PIECES * SMALL_BYTES, 0)
        # Tensors of several sequences lie apart.
        self.address = device.malloc(2 * SMALL_PIECES * SMALL_BYTES)

    def copy_s(self, *, gathered: bool) -> float:
        """``gathered``: as the worker does it; otherwise as anybody else's copies."""
        stream = ctypes.c_void_p(PER_THREAD)
        calls = self.device.calls if gathered else self.device.runtime
        begun = time.perf_counter()
        with self.device.vmm.gathered() if gathered else nullcontext():
            for at in range(0, SMALL_PIECES * SMALL_BYTES, SMALL_BYTES):
                place = ctypes.c_void_p((self.host.value or 0) + at)
                to = ctypes.c_void_p(self.address + 2 * at)
                assert not calls.cudaMemcpyAsync(to, place, SMALL_BYTES, 1, stream)
            assert not calls.cudaStreamSynchronize(stream)
        return time.perf_counter() - begun

    def close(self) -> None:
        assert self.device.free(self.address) == 0
        assert not self.device.runtime.cudaFreeHost(self.host)


def beside(small: Small, tag: int, *, gathered: bool) -> tuple[float, float]:
    """Small copies while a tag wakes: what both took, in ms; medians of several."""
    vmm, together, wakes = small.device.vmm, list[float](), list[float]()

    def wake() -> None:
        begun = time.perf_counter()
        vmm.wake(tag)
        wakes.append(time.perf_counter() - begun)

    for _ in range(TIMES):
        vmm.sleep(tag, keep=True)
        time.sleep(REST_S)
        thread = threading.Thread(target=wake)
        thread.start()
        time.sleep(0.002)  # memory is mapped by then, and copies are under way
        together.append(small.copy_s(gathered=gathered))
        thread.join()
    return round(1e3 * median(together), 3), round(1e3 * median(wakes), 3)


def by_piece(device: CudaDevice, into_gb_s: float) -> None:
    """One row per size of a piece: wakes alone, and what small copies beside one wait for."""
    vmm, tag, small = device.vmm, device.vmm.new_tag(), Small(device)
    with vmm.region(tag):
        block = device.malloc(MODEL)
    vmm.back_up(tag)
    alone = [small.copy_s(gathered=True) for _ in range(TIMES)]
    for piece_mib in PIECES_MIB:
        vmm.pace(piece_mib * MIB)
        soon, rested = list[float](), list[float]()
        for _ in range(TIMES):
            vmm.sleep(tag, keep=True)
            soon.append(timed_s(lambda: vmm.wake(tag)))
            vmm.sleep(tag, keep=True)
            time.sleep(REST_S)
            rested.append(timed_s(lambda: vmm.wake(tag)))
        row: dict[str, float] = {"piece_mib": piece_mib}
        for name, times in (("wake", soon), ("rested", rested)):
            row[f"{name}_ms"] = round(1e3 * median(times), 3)
            row[f"{name}_percent"] = round(100 * MODEL / median(times) / 1e9 / into_gb_s, 1)
        row["small_alone_ms"] = round(1e3 * median(alone), 3)
        for name, gathered in (("gathered", True), ("foreign", False)):
            row[f"{name}_ms"], row[f"wake_beside_{name}_ms"] = beside(small, tag, gathered=gathered)
        say(row)
    small.close()
    assert device.free(block) == 0


def by_size(device: CudaDevice, into_gb_s: float) -> None:
    """One row per size. A model's weights are one block; many small ones are the worst that there
    could be."""
    for blocks in (*([mib * MIB] for mib in SIZES_MIB), [3 * MIB] * MANY):
        row = moves(device, blocks)
        for name in ("wake", "rested"):
            row[f"{name}_percent"] = round(100 * row[f"{name}_gb_s"] / into_gb_s, 1)
        say(row)


def say(row: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    device = CudaDevice()
    rates = copy_rates(device, 512 * MIB)
    say(rates)
    {"sizes": by_size, "pieces": by_piece}[sys.argv[1]](device, rates["in_gb_s"])


if __name__ == "__main__":
    main()
