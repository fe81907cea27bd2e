"""llama.cpp as the oracle of the layer pipeline: all logits of any batch, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray

from vram_conductor.worker.llama.library import library, model_params
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.pipeline.forward import Batch, Capacity

_ONE_THREAD = EngineOptions(threads=1)


class LlamaOracle:
    """A model and a context of llama.cpp, its KV cache in float16 like ours.

    ``flash``: None leaves it to llama.cpp. Its flash attention on the CPU sums values in float16;
    the other one in float32.
    """

    def __init__(self, path: Path, capacity: Capacity, *, flash: bool | None = False) -> None:
        library()
        self._model: Any = ll.llama_model_load_from_file(
            str(path).encode(), model_params(_ONE_THREAD, dry=False)
        )
        assert self._model, f"llama.cpp refused {path}"
        self.vocab: Any = ll.llama_model_get_vocab(self._model)
        self.n_vocab = ll.llama_vocab_n_tokens(self.vocab)
        params = ll.llama_context_default_params()
        # Every sequence has n_ctx of its own.
        params.n_ctx = -(-capacity.n_ctx // 256) * 256 * capacity.sequences
        params.n_seq_max = capacity.sequences
        params.n_batch = params.n_ubatch = params.n_outputs_max = capacity.tokens_max
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = ll.GGML_TYPE_F16
        params.no_perf = True
        # A build for GPUs would compute large batches there.
        params.offload_kqv = params.op_offload = False
        params.pooling_type = ll.LLAMA_POOLING_TYPE_NONE
        params.flash_attn_type = (
            ll.LLAMA_FLASH_ATTN_TYPE_AUTO
            if flash is None
            else ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash
            else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context: Any = ll.llama_init_from_model(self._model, params)
        assert self._context
        self._batch = ll.llama_batch_init(capacity.tokens_max, 0, 1)

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of the wanted tokens, (wanted, n_vocab)."""
        self._decode(batch)
        rows = [ll.llama_get_logits_ith(self._context, int(at)) for at in batch.wanted]
        return _copied(rows, self.n_vocab)

    def states(self, batch: Batch) -> NDArray[np.float32]:
        """What the output head gets for the wanted tokens, (wanted, n_embd)."""
        ll.llama_set_embeddings(self._context, True)
        self._decode(batch)
        rows = [ll.llama_get_embeddings_ith(self._context, int(at)) for at in batch.wanted]
        found = _copied(rows, ll.llama_model_n_embd(self._model))
        ll.llama_set_embeddings(self._context, False)
        return found

    def _decode(self, batch: Batch) -> None:
        given = self._batch
        given.n_tokens = len(batch)
        wanted = set(batch.wanted.tolist())
        for at in range(len(batch)):
            given.token[at] = batch.tokens[at]
            given.pos[at] = batch.positions[at]
            given.n_seq_id[at] = 1
            given.seq_id[at][0] = batch.sequences[at]
            given.logits[at] = at in wanted
        # A batch may go back: what follows is dropped, as the layer engine does.
        memory: Any = ll.llama_get_memory(self._context)
        for sequence in np.unique(batch.sequences):
            first = int(batch.positions[batch.sequences == sequence].min())
            ll.llama_memory_seq_rm(memory, int(sequence), first, -1)
        assert ll.llama_decode(self._context, given) == 0

    def reset(self) -> None:
        memory: Any = ll.llama_get_memory(self._context)
        ll.llama_memory_clear(memory, True)

    def tokenize(self, text: str) -> NDArray[np.int32]:
        """With the tokens that a model wants before a text."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = ll.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, False)
        assert count > 0
        return np.array(ids[:count], np.int32)

    def close(self) -> None:
        ll.llama_batch_free(self._batch)
        ll.llama_free(self._context)
        ll.llama_model_free(self._model)

    def __enter__(self) -> LlamaOracle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _copied(rows: Sequence[Any], width: int) -> NDArray[np.float32]:
    copies = [np.ctypeslib.as_array(row, (width,)) for row in rows]
    return np.array(copies, np.float32).reshape(len(rows), width)
