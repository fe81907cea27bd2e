"""One call of the CUDA runtime or driver, and what becomes of its error. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram_conductor.protocol.errors import Internal


def do(call: Callable[..., Any], *args: Any) -> Any:
    """A call of the runtime or driver.

    Raises:
        Internal: ``cuda_failed``.
    """
    try:
        return call(*args)
    except RuntimeError as error:
        raise Internal(
            "cuda_failed",
            f"CUDA refuses {call.__name__}: {error}; if this comes again, look for errors of the "
            "GPU in the system's log (dmesg, Xid)",
            status=getattr(error, "status", None),
        ) from None
