"""Who a model file is."""

from __future__ import annotations

import hashlib
import os
import stat

from vram_conductor.protocol.errors import NotFound


def model_id(found: os.stat_result) -> str:
    """Twelve hex digits over (device, inode, size, mtime_ns): two names of a file are one
    model, a replaced file is another."""
    identity = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    return hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()


def stat_model(path: str) -> os.stat_result:
    """``stat`` of a regular file.

    Raises:
        NotFound: ``no_such_model``. Opening anything but a file might block for ever.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - paths are strings throughout the engine contract
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    else:
        if stat.S_ISREG(found.st_mode):
            return found
        why = "not a regular file"
    raise NotFound(
        "no_such_model",
        f"cannot open the model file {path!r}: {why}; check the name, or pull it",
        path=path,
    )
