"""Creating a ``llama_context``: the parameters are fixed here, for real and for dry runs alike."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.llama.library import cpu_threads, library
from vram_conductor.worker.llama.logs import Capture
from vram_conductor.worker.llama.options import EngineOptions

GGML_TYPES = {
    "f32": ll.GGML_TYPE_F32,
    "f16": ll.GGML_TYPE_F16,
    "q8_0": ll.GGML_TYPE_Q8_0,
    "q4_0": ll.GGML_TYPE_Q4_0,
}


def context_params(options: EngineOptions, shape: PoolShape) -> Any:
    """``llama_context_params`` of a pool.

    ``n_outputs_max`` is the number of slots: the default reserves logits for a whole
    micro-batch. ``kv_unified`` lets a state move between pools of any number of slots.
    ``swa_full=False`` keeps only the window of sliding-window layers.
    """
    params = ll.llama_context_default_params()
    params.n_ctx = shape.cells
    params.n_seq_max = shape.slots
    params.n_batch = params.n_ubatch = options.batch_tokens
    params.n_outputs_max = shape.slots
    params.n_threads = params.n_threads_batch = cpu_threads(options)
    params.type_k = params.type_v = GGML_TYPES[shape.kv_type]
    params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_AUTO
    params.kv_unified = True
    params.swa_full = False
    params.no_perf = True
    params.offload_kqv = params.op_offload = options.device_kind == "cuda"
    return params


def create_context(model: Any, options: EngineOptions, shape: PoolShape) -> tuple[Any, Capture]:
    """A context (None where llama.cpp refused) and what was logged meanwhile."""
    with library().logs.capture() as capture:
        context = ll.llama_init_from_model(model, context_params(options, shape))
    return context, capture
