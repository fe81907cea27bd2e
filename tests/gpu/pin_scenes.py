"""Scenes of ``test_pinning_gpu.py``, each in a process of its own: ``python pin_scenes.py NAME``.
The last line that a scene prints is its figures, as JSON."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vram_conductor.protocol.values import ConversationKey, PoolShape
from vram_conductor.worker import half_memory
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.pin_cuda import CudaPinner
from vram_conductor.worker.pinning import PIECE_BYTES, Pinning
from vram_conductor.worker.store import ParkedMeta

MIB = 1 << 20
SIZE = 256 * MIB
SHM = "/dev/shm"
KEY = ConversationKey("local", "agent", "main")


def meta(size: int, stamp: int = 0) -> ParkedMeta:
    return ParkedMeta(KEY, "model", "build", "f16", "", stamp, 3, size)


class Device:
    """Copies between the host and one buffer, on a stream that waits for nobody."""

    def __init__(self, size: int) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context, self.buffer = ctypes.c_void_p(), ctypes.c_uint64()
        self.stream = ctypes.c_void_p()
        self.do("cuInit", 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.here()
        self.do("cuMemAlloc_v2", ctypes.byref(self.buffer), ctypes.c_size_t(size))
        self.do("cuStreamCreate", ctypes.byref(self.stream), 1)

    def here(self) -> None:
        """This thread may use it, too."""
        self.do("cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.cuda, name)(*arguments))

    def do(self, name: str, *arguments: Any) -> None:
        code = self.call(name, *arguments)
        assert code == 0, (name, code)

    def copy_in(self, address: int, size: int) -> int:
        host, bytes_ = ctypes.c_void_p(address), ctypes.c_size_t(size)
        code = self.call("cuMemcpyHtoDAsync_v2", self.buffer, host, bytes_, self.stream)
        self.do("cuStreamSynchronize", self.stream)
        return code

    def copy_out(self, address: int, size: int) -> int:
        host, bytes_ = ctypes.c_void_p(address), ctypes.c_size_t(size)
        code = self.call("cuMemcpyDtoHAsync_v2", host, self.buffer, bytes_, self.stream)
        self.do("cuStreamSynchronize", self.stream)
        return code

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def rates(self, address: int, size: int) -> dict[str, float]:
        """GB/s in and out."""
        found: dict[str, float] = {}
        for name, copy in (("in", self.copy_in), ("out", self.copy_out)):
            seconds: list[float] = []
            for _ in range(8):
                began = time.perf_counter()
                assert copy(address, size) == 0
                seconds.append(time.perf_counter() - began)
            found[name] = round(size / statistics.median(seconds[1:]) / 1e9, 2)
        return found

    def pieces(self, address: int, size: int, n: int) -> dict[str, float]:
        """GB/s in and out, in ``n`` pieces, each of which is waited for."""
        found: dict[str, float] = {}
        for name, copy in (("in", self.copy_in), ("out", self.copy_out)):
            began = time.perf_counter()
            for at in range(n):
                assert copy(address + at * size, size) == 0
            found[name] = round(n * size / (time.perf_counter() - began) / 1e9, 2)
        return found


def gathered(model_path: str) -> dict[str, Any]:
    """States of two conversations whose cells take turns: copied piece by piece and together they
    are the same bytes, out and in. Run it with the preload library."""
    from vram_conductor.worker.bench.parking import random_ids
    from vram_conductor.worker.llama import open_engine
    from vram_conductor.worker.llama.options import EngineOptions
    from vram_conductor.worker.vmm.tagged import Tagged

    engine = open_engine(EngineOptions(device_kind="cuda"))
    model = engine.load(model_path, "model")
    pool = model.open_pool(PoolShape(2048, 2))
    together, alone = pool._buffers, Tagged(None)
    for slot, tokens in ((0, 300), (1, 200)):
        pool.decode([(slot, random_ids(tokens), 0, True)])
    for step in range(100):
        pool.decode([(0, random_ids(1), 300 + step, True), (1, random_ids(1), 200 + step, True)])

    def state(slot: int, buffers: Tagged) -> bytes:
        pool._buffers = buffers
        data = bytearray(pool.state_bytes(slot))
        assert pool.get_state(slot, memoryview(data)) == len(data)
        return bytes(data)

    before = [state(slot, alone) for slot in (0, 1)]
    same_out = [state(slot, together) for slot in (0, 1)] == before
    pool._buffers = together
    pool.set_state(0, memoryview(before[0]))  # into the holes that it leaves itself
    same_in = state(0, alone) == before[0]
    untouched = state(1, alone) == before[1]
    pool._buffers = together
    pool.truncate(0, 0)
    pool.truncate(1, 0)
    pool.set_state(0, memoryview(before[0]))
    in_a_row = state(0, alone) == before[0]
    pool._buffers = together
    pool.close()
    model.close()
    engine.close()
    return {
        "mechanism": engine.mechanism,
        "bytes": [len(data) for data in before],
        "same_out": same_out,
        "same_in": same_in,
        "untouched": untouched,
        "in_a_row": in_a_row,
    }


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def arena(folder: str, pinning: Pinning) -> Arena:
    fd = os.open(folder, os.O_RDONLY)
    made = Arena.create(fd, "a.kv", SIZE, pinning)
    os.close(fd)
    return made


def written(made: Arena) -> None:
    with made.begin(SIZE) as view:
        ctypes.memset(address_of(view), 1, SIZE)
    made.commit(meta(SIZE))


def pin_all(made: Arena) -> list[float]:
    """Milliseconds that each piece took."""
    took: list[float] = []
    progress = "more"
    while progress != "done":
        began = time.perf_counter()
        progress = made.pin_some()
        took.append((time.perf_counter() - began) * 1e3)
        assert progress != "busy"
    return took


def rates() -> dict[str, Any]:
    """Registering an arena's half in shared memory, and what that is worth."""
    device = Device(SIZE)
    pinner = CudaPinner()
    found: dict[str, Any] = {"spans": pinner.spans}
    host = ctypes.c_void_p()
    device.do("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(SIZE), 0)
    ctypes.memset(host, 1, SIZE)
    assert host.value is not None
    found["host_alloc"] = device.rates(host.value, SIZE)
    device.do("cuMemFreeHost", host)
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        pinning = Pinning(1 << 40, pinner)
        made = arena(folder, pinning)
        written(made)
        with made.payload() as payload:
            address = int(_address_of_readonly(payload))
            found["pageable"] = device.rates(address, SIZE)
        free = device.free_bytes()
        took = pin_all(made)
        assert made.pinned
        found["pieces_ms"] = [round(value, 2) for value in took]
        found["pin_gb_s"] = round(SIZE / sum(took) / 1e6, 2)
        found["device_bytes_for_tables"] = free - device.free_bytes()
        found["registered"] = device.rates(address, SIZE)
        half = 2 * PIECE_BYTES
        found["across_pieces"] = device.rates(address + PIECE_BYTES // 2, half)
        # Where llama.cpp's tensors lie in a state: at no round address.
        found["askew"] = device.rates(address + 12, SIZE - 4096)
        found["by_4_mib"] = device.pieces(address + 12, 4 * MIB, 32)
        began = time.perf_counter()
        made.close()
        found["unpin_ms"] = round((time.perf_counter() - began) * 1e3, 2)
        found["device_bytes_kept"] = free - device.free_bytes()
        assert pinning.figures().pinned_bytes == 0
    pinner.close()
    return found


def _address_of_readonly(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def mixture() -> dict[str, Any]:
    """What the driver says to a copy over memory that is registered in part: the reason for all
    the care in ``half_memory.py``."""
    device = Device(4 * MIB)
    pinner = CudaPinner()
    with mmap.mmap(-1, 4 * MIB) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 1, 4 * MIB)
        pinner.pin(address, 2 * MIB)
        partly = device.copy_in(address, 4 * MIB), device.copy_out(address, 4 * MIB)
        pinner.pin(address + 2 * MIB, 2 * MIB)
        spanning = device.copy_in(address, 4 * MIB), device.copy_out(address, 4 * MIB)
        memory[:] = bytes(range(256)) * (4 * MIB // 256)
        device.copy_in(address, 4 * MIB)
        pinner.unpin(address)
        pinner.unpin(address + 2 * MIB)
        memory[:] = bytes(4 * MIB)
        plain = device.copy_out(address, 4 * MIB)
        whole = memory[:] == bytes(range(256)) * (4 * MIB // 256)
    pinner.close()
    return {
        "spans": pinner.spans,
        "partly": partly,
        "spanning": spanning,
        "plain": plain,
        "whole": whole,
    }


def others() -> dict[str, Any]:
    """How long small work of another thread takes while memory is being pinned, by piece and in
    one go."""
    device = Device(SIZE)
    pinner = CudaPinner()
    found: dict[str, Any] = {"spans": pinner.spans}
    found["idle"] = _meanwhile(device, lambda: time.sleep(0.3))
    for name, piece in (("pieces", PIECE_BYTES), ("whole", SIZE)):
        setattr(half_memory, "PIECE_BYTES", piece)  # noqa: B010
        with tempfile.TemporaryDirectory(dir=SHM) as folder:
            made = arena(folder, Pinning(1 << 40, pinner))
            written(made)
            found[name] = _meanwhile(device, lambda: pin_all(made))  # noqa: B023
            found[f"{name}_unpin"] = _meanwhile(device, made.close)
    pinner.close()
    return found


def _meanwhile(device: Device, work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of launch + wait of something small, over and over beside ``work``."""
    took: list[float] = []
    stop = threading.Event()

    def small() -> None:
        device.here()
        while not stop.is_set():
            began = time.perf_counter()
            device.do("cuMemsetD8Async", device.buffer, 0, ctypes.c_size_t(4096), device.stream)
            device.do("cuStreamSynchronize", device.stream)
            took.append((time.perf_counter() - began) * 1e3)

    thread = threading.Thread(target=small)
    thread.start()
    began = time.perf_counter()
    work()
    lasted = (time.perf_counter() - began) * 1e3
    stop.set()
    thread.join()
    took.sort()
    return {
        "lasted_ms": round(lasted, 2),
        "n": len(took),
        "median_ms": round(statistics.median(took), 4),
        "p99_ms": round(took[int(len(took) * 0.99)], 3),
        "max_ms": round(took[-1], 3),
    }


def killed(folder: str) -> None:
    """Parks for ever in memory that is pinned; somebody kills it."""
    store = KVStore(
        ArenaDir(Path(folder), "cuda:0"), 1 << 32, pinning=Pinning(1 << 40, CudaPinner())
    )
    device = Device(64 * MIB)
    size = 64 * MIB
    for stamp in range(1, 1 << 30):
        device.do(
            "cuMemsetD8_v2", device.buffer, ctypes.c_ubyte(stamp % 251), ctypes.c_size_t(size)
        )
        with store.writer(KEY, size, size) as view:
            assert device.copy_out(address_of(view), size) == 0
        store.commit(meta(size, stamp % 251))
        store._sealer.settle()
        while stamp in (2, 3) and not store.pinned(KEY):
            time.sleep(0.001)
        say(stamp)


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    say(json.dumps(result))
