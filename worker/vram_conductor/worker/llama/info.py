"""What a model says about itself, and who it is."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Literal

from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.values import ModelInfo
from vram_conductor.worker.llama.binding import unannotated, vocabulary
from vram_conductor.worker.llama.identity import ModelFiles
from vram_conductor.worker.llama.scratch import Dimensions


def read_info(model: Any, files: ModelFiles, name: str) -> ModelInfo:
    """Describe a loaded (or dry-loaded) ``llama_model``."""
    vocab = vocabulary(model)
    return ModelInfo(
        model=files.id,
        name=name,
        path=files.paths[0],
        file_bytes=files.bytes,
        arch=metadata(model, "general.architecture") or "unknown",
        n_ctx_train=int(ll.llama_model_n_ctx_train(model)),
        n_vocab=int(ll.llama_vocab_n_tokens(vocab)),
        chat_template=chat_template(model) is not None,
        rollback=rollback(model),
    )


def rollback(model: Any) -> Literal["any", "window", "none"]:
    """How far a sequence of this model can be rolled back (see ``ModelInfo.rollback``)."""
    if ll.llama_model_is_recurrent(model) or ll.llama_model_is_hybrid(model):
        return "none"
    return "window" if ll.llama_model_n_swa(model) > 0 else "any"


def read_dimensions(model: Any, arch: str) -> Dimensions:
    """What of a model decides what its contexts take beyond their buffers."""

    def largest(key: str) -> int:
        # Hybrid models list a number per layer.
        numbers = re.findall(r"\d+", metadata(model, f"{arch}.{key}") or "")
        return max(map(int, numbers), default=0)

    n_head = largest("attention.head_count")
    head = int(ll.llama_model_n_embd(model)) // n_head if n_head else 0
    head_k = largest("attention.key_length") or head
    return Dimensions(
        tokens=0,
        experts_used=largest("expert_used_count") or 1,
        n_head=n_head,
        head_v=largest("attention.value_length") or head,
        n_embd_kv=head_k * (largest("attention.head_count_kv") or n_head),
    )


def metadata(model: Any, key: str) -> str | None:
    """A scalar of the GGUF's key-value section as text, None where it is absent."""
    length = unannotated.llama_model_meta_val_str(model, key.encode(), None, 0)
    if length < 0:
        return None
    buffer = ctypes.create_string_buffer(length + 1)
    unannotated.llama_model_meta_val_str(model, key.encode(), buffer, length + 1)
    return buffer.value.decode("utf-8", "replace")


def chat_template(model: Any) -> str | None:
    """The file's own chat template."""
    text = ll.llama_model_chat_template(model, None)
    return text.decode("utf-8", "replace") if text else None


def rope_regime(model: Any, cells: int) -> int:
    """1 where a pool of ``cells`` uses the long rope factors, else 0.

    Models with two sets of factors (longrope: Phi-3, MiniCPM) take one or the other by the size
    of the *context*, not of the conversation (llama.cpp, ``get_rope_factors``): keys computed
    under one set are wrong under the other, and no check of llama.cpp notices.
    """
    arch = metadata(model, "general.architecture")
    trained = metadata(model, f"{arch}.rope.scaling.original_context_length")
    kind = metadata(model, f"{arch}.rope.scaling.type")
    if trained is None or kind in ("none", "linear", "yarn"):
        return 0
    return int(cells > int(trained))
