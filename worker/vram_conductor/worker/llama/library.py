"""The process-wide side of llama.cpp: initialised once, its log callback, its build.

Thread rule: :func:`library` may be called from any thread; what it returns is immutable but for
the log router, which is thread-safe.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.llama.logs import LEVEL_ERROR, LogRouter
from vram_conductor.worker.llama.options import EngineOptions

_LAST_WORDS = (b"CUDA error", b"  ", b"ggml_cuda_compute_forward")
"""Lines after which llama.cpp ends the process: whoever captures them reads them no more."""

_STDERR_FD = 2

_lock = threading.Lock()
_library: Library | None = None


class Library:
    """The loaded library.

    Attributes:
        build: version and a digest of the shared objects: states are exchanged between equal
            builds only.
        logs: where its log lines go.
        gpu_offload: whether this build has a GPU backend.
    """

    def __init__(self) -> None:
        # On an assertion llama.cpp would run a debugger on us for seconds before it aborts, and
        # nobody would be told of the worker's death until then.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self.logs = LogRouter()
        # Importing llama_cpp has installed a callback of its own; ours replaces it. The C side
        # keeps only the address, so the object must live as long as the process.
        self._callback = ll.llama_log_callback(self._on_log)
        ll.llama_log_set(self._callback, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.build = f"llama-cpp-python-{llama_cpp.__version__}+{_digest()}"
        self.gpu_offload = bool(ll.llama_supports_gpu_offload())

    def _on_log(self, level: int, text: bytes, _data: Any) -> None:
        # An exception cannot pass through C; a line that cannot be read is worth less than a job.
        line = text or b""
        if level == LEVEL_ERROR and line.startswith(_LAST_WORDS):
            os.write(_STDERR_FD, line)
        self.logs.event(level, line.decode("utf-8", "replace"))


def library() -> Library:
    """The one library of this process, initialised at the first call."""
    global _library
    with _lock:
        if _library is None:
            _library = Library()
        return _library


def _digest() -> str:
    """Eight hex digits over the shared objects' contents."""
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(ll.__file__).parent / "lib")
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(folder.glob("lib*.so")) + sorted(folder.glob("lib*.dylib")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def model_params(options: EngineOptions, *, dry: bool) -> Any:
    """``llama_model_params`` of a real or a dry load.

    Weights are read into buffers of our own (load mode none) on cpu: a mapped file would be
    counted beside the repacked copies that llama.cpp makes of some tensors, and a mapping
    shrinks and grows as the kernel likes, which no ledger can follow. On cuda the file is
    mapped, since it is only a source.
    """
    params = ll.llama_model_default_params()
    params.split_mode = ll.LLAMA_SPLIT_MODE_NONE
    if options.device_kind == "cuda":
        params.main_gpu = options.device_index
        params.n_gpu_layers = -1
        params.load_mode = ll.LLAMA_LOAD_MODE_MMAP
    else:
        params.main_gpu = -1  # no GPU at all, even where the build has one
        params.n_gpu_layers = 0
        params.load_mode = ll.LLAMA_LOAD_MODE_NONE
    params.lazy_mode = ll.LLAMA_LAZY_MODE_OFF  # all that is promised is there from the start
    if dry:
        params.no_alloc = True
        params.load_mode = ll.LLAMA_LOAD_MODE_NONE
    return params


def check_device(options: EngineOptions) -> None:
    """Raises FailedPrecondition ``no_device`` where the build cannot drive the device."""
    if options.device_kind == "cuda" and not library().gpu_offload:
        raise FailedPrecondition(
            "no_device",
            "this llama-cpp-python was built without CUDA; reinstall it with "
            'CMAKE_ARGS="-DGGML_CUDA=on", or configure a device of kind cpu',
        )


def cpu_threads(options: EngineOptions) -> int:
    """Threads for compute."""
    return options.threads or len(os.sched_getaffinity(0))
