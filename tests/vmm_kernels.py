"""``python -m vmm_kernels``: CuPy computes on memory that has slept."""

from __future__ import annotations

import sys
from typing import Any

from vmm_device import MIB, CudaDevice


def main() -> None:
    import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

    device = CudaDevice()
    tag, size = device.vmm.new_tag(), 256 * MIB
    with device.vmm.region(tag):
        address = device.malloc(size)
    memory = cupy.cuda.UnownedMemory(address, size, device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    numbers: Any = cupy.ndarray((size // 4,), dtype=cupy.int32, memptr=pointer)
    numbers[:] = cupy.arange(size // 4, dtype=cupy.int32)
    wanted = int((numbers.astype(cupy.int64) * 3 % 1009).sum())
    for _ in range(3):
        cupy.cuda.Device().synchronize()
        device.vmm.sleep(tag, keep=True)
        device.vmm.wake(tag)
        assert int((numbers.astype(cupy.int64) * 3 % 1009).sum()) == wanted
    del numbers, pointer, memory
    assert device.free(address) == 0
    sys.stdout.write("the same\n")


if __name__ == "__main__":
    main()
