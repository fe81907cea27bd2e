"""``python -m vmm_long N``: a gigabyte sleeps and wakes N times; nothing is lost or left over."""

from __future__ import annotations

import sys

from vmm_device import MIB, open_device
from vmm_scenes import clear, fill, intact, uses


def main() -> None:
    device = open_device()
    size = 1024 * MIB
    keeps, empties = device.vmm.new_tag(), device.vmm.new_tag()
    held = fill(device, keeps, size, 3 * MIB)
    spare = fill(device, empties, 256 * MIB)
    used = device.used_bytes()
    for _ in range(int(sys.argv[1])):
        device.vmm.sleep(empties, keep=False)
        device.vmm.sleep(keeps, keep=True)
        device.vmm.wake(empties)
        device.vmm.wake(keeps)
    uses(device, used)
    assert intact(device, held)
    device.vmm.sleep(keeps, keep=True)
    clear(device, held, spare)
    uses(device, used - size - (256 + 4) * MIB)


if __name__ == "__main__":
    main()
