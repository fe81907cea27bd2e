"""``python -m vram_conductor.worker``."""

from __future__ import annotations

import sys

from vram_conductor.worker.app import main

if __name__ == "__main__":
    sys.exit(main())
