"""``python -m vram_conductor.broker``."""

from __future__ import annotations

import sys

from vram_conductor.broker.shell.app import main

sys.exit(main())
