"""The real engine: llama.cpp through llama-cpp-python's low-level bindings.

Only modules of this package import ``llama_cpp``, and it is imported when :func:`open_engine` is
called, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine
    from vram_conductor.worker.llama.options import EngineOptions


def open_engine(options: EngineOptions) -> LlamaEngine:
    """The engine of this process's device. Loads and initialises the library at the first call.

    Raises:
        FailedPrecondition: ``no_library`` (llama-cpp-python is missing), ``no_device`` (a cuda
            device was asked for that this build or machine does not have).
    """
    from vram_conductor.worker.llama.engine import LlamaEngine

    return LlamaEngine(options)
