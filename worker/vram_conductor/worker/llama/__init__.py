"""The real engine: llama.cpp through llama-cpp-python's low-level bindings.

Only modules of this package import ``llama_cpp``, and it is imported when :func:`open_engine` is
called, not before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vram_conductor.protocol.errors import FailedPrecondition

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine
    from vram_conductor.worker.llama.options import EngineOptions


# libgomp's threads wait for each other by spinning, 300,000 times by default. Where something else
# runs on the same cores, the spinning takes the time slice from the thread that is waited for:
# measured 0.8 instead of 33 tokens/s with two threads on two busy cores; sleeping early costs 3 to
# 5 % on idle ones (docs/performance.md), so a machine that serves nothing else may set it back.
# libgomp reads this once, when it is loaded, so it is set before any module here imports it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def open_engine(options: EngineOptions) -> LlamaEngine:
    """The engine of this process's device. Loads and initialises the library at the first call.

    Raises:
        FailedPrecondition: ``no_library`` (llama-cpp-python is missing), ``no_device`` (a cuda
            device was asked for that this build or machine does not have).
    """
    try:
        from vram_conductor.worker.llama.engine import LlamaEngine
    except (ImportError, OSError, RuntimeError) as error:
        # llama-cpp-python raises RuntimeError where its shared library is missing or broken.
        raise FailedPrecondition(
            "no_library",
            f"llama.cpp cannot be loaded ({error}); in a clone of the project: make setup",
        ) from error
    return LlamaEngine(options)
