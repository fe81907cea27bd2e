"""Loaded by every interpreter that finds this folder on its path: poisons the library of a worker.

Once the file that ``POISON_FILE`` names holds the process's own number, every decode fails, as it
does on a device whose context is broken. The next process is well again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def poison(file: Path) -> None:
    from vram_conductor.protocol.errors import Internal
    from vram_conductor.worker.llama.pool import LlamaPool

    plain = LlamaPool.decode
    mine = str(os.getpid())

    def decode(pool: LlamaPool, batch: Sequence[Any]) -> None:
        if file.exists() and file.read_text() == mine:
            raise Internal("decode_failed", "llama_decode returned -3: the context is poisoned")
        plain(pool, batch)

    setattr(LlamaPool, "decode", decode)  # noqa: B010


if "vram_conductor.worker" in sys.orig_argv and "POISON_FILE" in os.environ:
    poison(Path(os.environ["POISON_FILE"]))
