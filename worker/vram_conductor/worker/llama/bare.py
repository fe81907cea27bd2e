"""llama.cpp by itself: a model and a context as its own tools open them, to compare with.

No pool, no memory that sleeps, no estimate: what the layer pipeline is measured against.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray

from vram_conductor.protocol.errors import OutOfRange, ResourceExhausted
from vram_conductor.worker.llama.batch import Batch
from vram_conductor.worker.llama.binding import shared_object, vocabulary
from vram_conductor.worker.llama.library import cpu_threads, library, model_params
from vram_conductor.worker.llama.loading import load_error
from vram_conductor.worker.llama.options import EngineOptions

_FLASH = {
    None: ll.LLAMA_FLASH_ATTN_TYPE_AUTO,
    True: ll.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: ll.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

CELLS_MULTIPLE = 256
"""llama.cpp rounds the context of a sequence up to so many tokens."""


def sequences_max() -> int:
    """Most sequences that a context can have."""
    return int(shared_object.llama_max_parallel_sequences())


class BareModel:
    """The weights, of which ``gpu_layers`` lie on the GPU (-1: all, the output layer included).

    Raises:
        InvalidArgument, Unimplemented, Internal: as ``loading.load_model``.
    """

    def __init__(self, path: str, options: EngineOptions, gpu_layers: int) -> None:
        self._options = options
        params = model_params(options, dry=False)
        # As its own tools do: what is not repacked need not be copied.
        params.load_mode = ll.LLAMA_LOAD_MODE_MMAP
        if options.device_kind == "cuda":
            params.n_gpu_layers = gpu_layers
        with library().logs.capture() as capture:
            self._model: Any = ll.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise load_error(path, capture.problem(), capture.texts())
        self._vocab = vocabulary(self._model)
        self.n_vocab = int(ll.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: str) -> list[int]:
        """With what the model wants before a text; [] for a model without a tokenizer."""
        if ll.llama_vocab_type(self._vocab) == ll.LLAMA_VOCAB_TYPE_NONE:
            return []
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = ll.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, False)
        return list(ids[: max(0, count)])

    def open(self, room: Room) -> BareContext:
        """A context.

        Raises:
            OutOfRange: ``too_many_sequences``.
            ResourceExhausted: ``no_memory``.
        """
        return BareContext(self._model, self.n_vocab, self._options, room)

    def close(self) -> None:
        """After its contexts."""
        if self._model:
            ll.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> BareModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Room:
    """What a context is made for.

    Attributes:
        n_ctx: tokens of each sequence.
        tokens: of one batch.
        outputs: of them, those with logits.
        flash: flash attention; None: where llama.cpp finds it right. On the CPU it sums values in
            float16, otherwise in float32.
    """

    n_ctx: int
    sequences: int = 1
    tokens: int = 512
    outputs: int = 1
    flash: bool | None = None


class BareContext:
    """One context; its KV cache is in float16."""

    def __init__(self, model: Any, n_vocab: int, options: EngineOptions, room: Room) -> None:
        if room.sequences > sequences_max():
            raise OutOfRange(
                "too_many_sequences",
                f"llama.cpp has at most {sequences_max()} sequences in a context, not "
                f"{room.sequences}",
                sequences=room.sequences,
                most=sequences_max(),
            )
        params = ll.llama_context_default_params()
        params.n_ctx = -(-room.n_ctx // CELLS_MULTIPLE) * CELLS_MULTIPLE * room.sequences
        params.n_seq_max = room.sequences
        params.n_batch = params.n_ubatch = room.tokens
        params.n_outputs_max = room.outputs
        params.n_threads = params.n_threads_batch = cpu_threads(options)
        params.type_k = params.type_v = ll.GGML_TYPE_F16
        params.offload_kqv = params.op_offload = options.device_kind == "cuda"
        params.no_perf = True
        params.flash_attn_type = _FLASH[room.flash]
        with library().logs.capture() as capture:
            self._context: Any = ll.llama_init_from_model(model, params)
        if not self._context:
            raise ResourceExhausted(
                "no_memory",
                f"llama.cpp opened no context for {room.sequences} sequences of {room.n_ctx} "
                f"tokens: {capture.problem()}",
            )
        self._batch, self._room, self._n_vocab = Batch(room.tokens), room, n_vocab

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        """Compute one batch; the logits of ``wanted``, indices into it, are in main memory then.

        Raises:
            ResourceExhausted: ``no_memory``.
        """
        outputs, ids = set(wanted), np.asarray(tokens, np.int32)
        entries = [
            (sequence, ids[index : index + 1], position, index in outputs)
            for index, (position, sequence) in enumerate(zip(positions, sequences, strict=True))
        ]
        self._batch.fill(entries, self._room.outputs)
        if ll.llama_decode(self._context, self._batch.struct):
            raise ResourceExhausted("no_memory", f"llama.cpp computed no {len(tokens)} tokens")
        ll.llama_synchronize(self._context)

    def logits(self, wanted: Sequence[int]) -> NDArray[np.float32]:
        """Of the last batch (len(wanted), n_vocab): a copy."""
        found = np.empty((len(wanted), self._n_vocab), np.float32)
        for row, index in zip(found, wanted, strict=True):
            logits = ll.llama_get_logits_ith(self._context, index)
            row[:] = np.ctypeslib.as_array(logits, (self._n_vocab,))
        return found

    def clear(self) -> None:
        """Forget all sequences."""
        memory: Any = ll.llama_get_memory(self._context)
        ll.llama_memory_clear(memory, True)

    def close(self) -> None:
        """More than once is fine."""
        if self._context:
            ll.llama_free(self._context)
            self._context = None

    def __enter__(self) -> BareContext:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
