"""Asks a worker's own code about this host, in a process of its own: nothing of it is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vram_conductor.protocol.errors import FailedPrecondition, Internal
from vram_conductor.protocol.values import KVType

PROBE_S = 120.0

INSTALL = "in a clone of the project: make setup, or pip install '.[broker,worker]'"
"""How the parts of a worker are installed."""

_NOT_INSTALLED = ("ModuleNotFoundError", "ImportError", "OSError", "RuntimeError")
"""What importing a missing or broken library raises."""


def probe(*arguments: str) -> Any:
    """Run ``vram_conductor.worker.probe``; its JSON value.

    Raises:
        FailedPrecondition: ``worker_missing``: the worker's packages are not installed, or are
            broken.
        Internal: ``probe_failed``: anything else; both have the last line of what it said.
    """
    command = [sys.executable, "-m", "vram_conductor.worker.probe", *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Internal(
            "probe_failed", f"the worker's probe gave no answer within {PROBE_S:.0f} s"
        ) from None
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit code {result.returncode}, no output"
        if last.startswith(_NOT_INSTALLED):
            raise FailedPrecondition(
                "worker_missing",
                f"the worker cannot run here ({last}); {INSTALL}",
            )
        raise Internal("probe_failed", f"the worker's probe failed: {last}")
    return msgspec.json.decode(result.stdout)


def estimates(
    paths: Sequence[Path], n_ctx: int, kv_type: KVType = "f16", fit_bytes: int | None = None
) -> list[dict[str, Any]]:
    """Dry runs of model files on the cpu.

    Returns:
        Per file ``n_ctx`` (at most what the model was trained with), ``weights_bytes``,
        ``pool_bytes``, ``state_bytes``, ``info`` and, with ``fit_bytes`` (for weights and pool
        together), ``fit_cells``; or ``error``. Sizes in bytes.
    """
    flags = ["--n-ctx", str(n_ctx), "--kv-type", kv_type]
    if fit_bytes is not None:
        flags += ["--fit-bytes", str(fit_bytes)]
    return list(probe("estimate", *[str(path) for path in paths], *flags))
