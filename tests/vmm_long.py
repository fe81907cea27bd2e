"""``python -m vmm_long N MIB``: so much sleeps and wakes N times; nothing is lost or left over."""

from __future__ import annotations

import sys

from vmm_device import MIB, open_device
from vmm_scenes import clear, fill, intact, rounded, uses


def main() -> None:
    device = open_device()
    times, size = int(sys.argv[1]), int(sys.argv[2]) * MIB
    keeps, empties = device.vmm.new_tag(), device.vmm.new_tag()
    held = fill(device, keeps, size, 3 * MIB)
    spare = fill(device, empties, size // 4)
    used = device.used_bytes()
    for _ in range(times):
        device.vmm.sleep(empties, keep=False)
        device.vmm.sleep(keeps, keep=True)
        device.vmm.wake(empties)
        device.vmm.wake(keeps)
    uses(device, used)
    assert intact(device, held)
    device.vmm.sleep(keeps, keep=True)
    clear(device, held, spare)
    uses(device, used - rounded(device, size, 3 * MIB, size // 4))


if __name__ == "__main__":
    main()
