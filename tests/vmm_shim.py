"""``python -m vmm_shim FILE``: the faults of the shim arrive in the preload library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fault_shim import FaultFile
from vmm_device import MIB, StubDevice
from vmm_scenes import clear, fill, intact

from vram_conductor.protocol.errors import Internal, ResourceExhausted


def main() -> None:
    device, fault = StubDevice(), FaultFile(Path(sys.argv[1]))
    tag = device.vmm.new_tag()
    for name in ("cuMemCreate", "cuMemMap"):
        fault.arm(name, 2)
        held = fill(device, tag, MIB)
        with pytest.raises(MemoryError):
            fill(device, tag, MIB)
        assert (fault.fired(), fault.calls()) == (1, 2)
        assert device.vmm.stat(tag).allocations == 1
        clear(device, held)
    held = fill(device, tag, 2 * MIB)
    fault.arm("cuMemHostAlloc")
    with pytest.raises(Internal) as refused:
        device.vmm.sleep(tag, keep=True)
    assert refused.value.reason == "backup_failed"
    fault.arm("cuMemUnmap", code=719)
    with pytest.raises(Internal) as broken:
        device.vmm.sleep(tag, keep=True)
    assert broken.value.reason == "sleep_failed"
    device.vmm.sleep(tag, keep=True)
    fault.arm("cuMemCreate")
    with pytest.raises(ResourceExhausted):
        device.vmm.wake(tag)
    device.vmm.wake(tag)
    assert intact(device, held)
    clear(device, held)
    fault.arm("cudaMalloc")
    with pytest.raises(MemoryError):
        device.malloc(100)
    assert device.free(device.malloc(100)) == 0
    keeps(device, fault)


def keeps(device: StubDevice, fault: FaultFile) -> None:
    """What is freed goes on being used, and nobody is told; and only what was freed meanwhile."""
    tag = device.vmm.new_tag()
    before = device.used_bytes()
    gone = fill(device, tag, MIB, MIB)
    stays = fill(device, tag, MIB)
    fault.keep()
    clear(device, gone)
    assert device.vmm.stat(tag).bytes == MIB
    assert device.used_bytes() == before + 3 * MIB
    assert fault.fired() == 4, "an unmap and an address for each"
    fault.arm("", 0)
    assert intact(device, stays)
    clear(device, stays)
    assert device.used_bytes() == before + 2 * MIB


if __name__ == "__main__":
    main()
