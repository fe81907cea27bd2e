"""One ``llama_context``: sequences in one unified cache, a preallocated batch, states."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.values import ModelInfo, PoolShape
from vram_conductor.worker.engine import Sampler, Tokens
from vram_conductor.worker.llama.batch import Batch
from vram_conductor.worker.llama.context import create_context
from vram_conductor.worker.llama.library import library
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.sampler import LlamaSampler
from vram_conductor.worker.llama.sizes import measured_pool

_NO_CELLS, _ABORTED, _INVALID = 1, 2, -1
"""Results of ``llama_decode`` (llama.h)."""


class LlamaPool:
    """See ``engine.Pool``. Used by one thread at a time.

    Attributes:
        batch_tokens: most tokens of one :meth:`decode`.
    """

    def __init__(
        self, model: Any, info: ModelInfo, n_swa: int, options: EngineOptions, shape: PoolShape
    ) -> None:
        self.shape = shape
        self._rollback = info.rollback
        self._n_swa = n_swa
        self._context, capture = create_context(model, options, shape)
        if not self._context:
            raise ResourceExhausted(
                "pool_failed",
                f"cannot create a pool of {shape.cells} cells for {info.name}: "
                f"{capture.problem() or 'llama.cpp gave no reason'}",
                retryable=True,
                cells=shape.cells,
                slots=shape.slots,
                kv_type=shape.kv_type,
            )
        self.sizes = measured_pool(capture.texts(), options.device_kind)
        self.measured_bytes = self.sizes.total_bytes
        self._memory = ll.llama_get_memory(self._context)
        self.batch_tokens = int(ll.llama_n_batch(self._context))
        self._batch = Batch(self.batch_tokens)

    def decode(self, batch: Sequence[tuple[int, Tokens, int, bool]]) -> None:
        """Compute one batch of at most :attr:`batch_tokens` tokens.

        Raises:
            ResourceExhausted: ``kv_full``: no free cells; nothing changed.
            Internal: ``decode_failed``: entries of several slots may be partly in the cache;
                the slots of this batch must be emptied.
        """
        n_tokens = sum(len(ids) for _, ids, _, _ in batch)
        n_outputs = sum(want for _, _, _, want in batch)
        if not 0 < n_tokens <= self.batch_tokens or n_outputs > self.shape.slots:
            # llama.cpp would abort the process.
            raise Internal(
                "decode_failed",
                f"a batch of {n_tokens} tokens and {n_outputs} outputs; this pool takes 1 to "
                f"{self.batch_tokens} tokens and {self.shape.slots} outputs",
                tokens=n_tokens,
                outputs=n_outputs,
            )
        self._batch.fill(batch)
        with library().logs.capture() as capture:
            result = ll.llama_decode(self._context, self._batch.struct)
        if result == 0:
            return
        self._batch.last = {}
        if result == _NO_CELLS:
            raise ResourceExhausted(
                "kv_full",
                f"the pool's {self.shape.cells} cells are full",
                cells=self.shape.cells,
                tokens=n_tokens,
            )
        raise Internal(
            "decode_failed",
            f"llama_decode returned {result}: {capture.problem() or 'no reason given'}",
            result=result,
        )

    def sample(self, slot: int, sampler: Sampler) -> int:
        """Sample from the logits that the last :meth:`decode` computed for ``slot``; the
        sampler has then accepted the token."""
        assert isinstance(sampler, LlamaSampler)
        index = self._batch.last[slot]
        return int(ll.llama_sampler_sample(sampler.handle, self._context, index))

    def pos_min(self, slot: int) -> int:
        """First position still in the cache, -1 if the slot is empty."""
        return int(ll.llama_memory_seq_pos_min(self._memory, slot))

    def pos_max(self, slot: int) -> int:
        """Last position in the cache, -1 if the slot is empty."""
        return int(ll.llama_memory_seq_pos_max(self._memory, slot))

    def truncate(self, slot: int, keep: int) -> bool:
        """Remove positions >= ``keep`` where that is correct; False changes nothing.

        A removal from a sliding-window cache succeeds even where tokens that the remaining
        ones attend to are gone already, so the window's first position is read before it.
        """
        last = self.pos_max(slot)
        if keep > last:
            return True
        if keep <= 0:
            self._empty(slot)
            return True
        if self._rollback == "none":
            return False
        if self._rollback == "window" and self.pos_min(slot) > max(0, keep - self._n_swa):
            return False
        return bool(ll.llama_memory_seq_rm(self._memory, slot, keep, -1))

    def _empty(self, slot: int) -> None:
        ll.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._batch.last.pop(slot, None)

    def state_bytes(self, slot: int) -> int:
        """Current size of the slot's state; changes with every decode. 0 if it is empty."""
        if self.pos_max(slot) < 0:
            return 0
        return int(ll.llama_state_seq_get_size(self._context, slot))

    def get_state(self, slot: int, into: memoryview) -> int:
        """Copy the slot's state out; 0 and nothing written if it is empty."""
        size = self.state_bytes(slot)
        if size == 0:
            return 0
        if size > into.nbytes:
            raise Internal(
                "state_failed",
                f"the state of slot {slot} has {size} bytes, the buffer {into.nbytes}",
                state_bytes=size,
                buffer_bytes=into.nbytes,
            )
        target = (ctypes.c_uint8 * into.nbytes).from_buffer(into)
        with library().logs.capture() as capture:
            written = int(ll.llama_state_seq_get_data(self._context, target, size, slot))
        if written != size:
            raise Internal(
                "state_failed",
                f"saving slot {slot} wrote {written} of {size} bytes: {capture.problem()}",
                state_bytes=size,
                written_bytes=written,
            )
        return written

    def set_state(self, slot: int, blob: memoryview) -> None:
        """Replace the slot's state; an empty blob empties it."""
        self._empty(slot)
        if blob.nbytes == 0:
            return
        source = _address(blob)
        with library().logs.capture() as capture:
            read = int(ll.llama_state_seq_set_data(self._context, source, blob.nbytes, slot))
        if read != blob.nbytes:
            # Part of it may be there already, behind a pos_max of -1.
            self._empty(slot)
            raise Internal(
                "state_failed",
                f"restoring {blob.nbytes} bytes into slot {slot} took {read}: "
                f"{capture.problem() or 'no reason given'}",
                state_bytes=blob.nbytes,
                read_bytes=read,
            )

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._context:
            ll.llama_free(self._context)
            self._context = None


def _address(blob: memoryview) -> Any:
    """A ``uint8_t *`` into ``blob``; read-only buffers too, which ctypes does not take itself."""
    import numpy as np

    array = np.frombuffer(blob, np.uint8)
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
