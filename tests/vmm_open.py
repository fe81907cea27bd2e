"""``python -m vmm_open N``: opens the library as if an interface N newer were wanted; prints why
that does not work."""

from __future__ import annotations

import sys

import pytest

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.vmm import library


def main() -> None:
    library.ABI += int(sys.argv[1])
    with pytest.raises(FailedPrecondition) as caught:
        library.Vmm.open()
    assert caught.value.reason == "vmm_unavailable"
    sys.stdout.write(f"{caught.value.info.message}\n")


if __name__ == "__main__":
    main()
