"""Loading a ``llama_model``, for real or dry, with typed errors."""

from __future__ import annotations

import os
import re
from typing import Any

from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import (
    ConductorError,
    Internal,
    InvalidArgument,
    Unimplemented,
)
from vram_conductor.worker.llama.identity import ModelFiles
from vram_conductor.worker.llama.info import metadata
from vram_conductor.worker.llama.library import library, model_params
from vram_conductor.worker.llama.logs import Capture
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.partcheck import check_files, misnamed

_ARCH = re.compile(r"unknown model architecture: '([^']*)'")
_MEMORY = re.compile(r"unable to allocate|failed to allocate|out of memory|cudaMalloc")


def load_model(files: ModelFiles, options: EngineOptions, *, dry: bool) -> tuple[Any, Capture]:
    """A ``llama_model`` and what was logged meanwhile; nothing stays allocated on failure.

    Raises:
        NotFound: ``no_such_model``.
        InvalidArgument: ``bad_model``: not a GGUF, truncated or corrupt; ``wrong_model_part``.
        Unimplemented: ``unsupported_model``: an architecture that llama.cpp does not know, or
            one that does not generate text token by token.
        Internal: ``load_failed``, with llama.cpp's own line.
    """
    check_files(files)
    path = files.paths[0]
    with library().logs.capture() as capture:
        model = ll.llama_model_load_from_file(os.fsencode(path), model_params(options, dry=dry))
    if not model:
        error = load_error(path, capture.problem(), capture.texts())
        # Its header is only looked at where that is what may be wrong: it takes memory, too.
        raise (misnamed(files) if error.reason == "bad_model" else None) or error
    unfit = _unfit(model)
    if unfit:
        arch = metadata(model, "general.architecture") or "unknown"
        ll.llama_model_free(model)
        raise Unimplemented(
            "unsupported_model",
            f"{path} (architecture {arch}) {unfit}; choose a decoder-only text model",
            path=path,
            arch=arch,
        )
    return model, capture


def load_error(path: str, problem: str, lines: list[str]) -> ConductorError:
    """The typed error for a load that llama.cpp gave up, quoting its reason."""
    text = "\n".join(lines)
    arch = _ARCH.search(text)
    if arch:
        return Unimplemented(
            "unsupported_model",
            f"{path} has architecture {arch[1]!r}, which this llama.cpp does not know; "
            "choose another model, or a newer llama-cpp-python",
            path=path,
            arch=arch[1],
        )
    quoted = problem or "llama.cpp gave no reason"
    if _MEMORY.search(text):
        return Internal("load_failed", f"cannot load {path}: {quoted}", retryable=True, path=path)
    return InvalidArgument(
        "bad_model",
        f"{path} is truncated or corrupt, get the file again; llama.cpp says: {quoted}",
        path=path,
    )


def _unfit(model: Any) -> str:
    """Why this model cannot serve conversations; empty if it can."""
    if ll.llama_model_has_encoder(model):
        return "has an encoder"
    if not ll.llama_model_has_decoder(model):
        return "has no decoder"
    if ll.llama_model_is_diffusion(model):
        return "is a diffusion model"
    return ""
