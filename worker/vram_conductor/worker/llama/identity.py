"""Who a model file is."""

from __future__ import annotations

import hashlib
import os

from vram_conductor.protocol.errors import NotFound


def model_id(stat: os.stat_result) -> str:
    """Twelve hex digits over (device, inode, size, mtime_ns): two names of a file are one
    model, a replaced file is another."""
    identity = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()


def stat_model(path: str) -> os.stat_result:
    """Raises NotFound ``no_such_model``."""
    try:
        return os.stat(path)  # noqa: PTH116 - paths are strings throughout the engine contract
    except (OSError, ValueError) as error:
        raise NotFound(
            "no_such_model",
            f"cannot open the model file {path!r}: {error}; check the name, or pull it",
            path=path,
        ) from None
