"""One ``llama_context``: sequences in one unified cache, a preallocated batch, states."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.values import ModelInfo, PoolShape
from vram_conductor.worker.engine import Sampler, Tokens
from vram_conductor.worker.llama.batch import Batch
from vram_conductor.worker.llama.binding import unannotated
from vram_conductor.worker.llama.context import create_context
from vram_conductor.worker.llama.info import rope_regime
from vram_conductor.worker.llama.library import library
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.sampler import LlamaSampler
from vram_conductor.worker.llama.sizes import measured_pool
from vram_conductor.worker.vmm.library import Vmm
from vram_conductor.worker.vmm.tagged import Tagged

_NO_CELLS = 1
"""Result of ``llama_decode`` that leaves everything as it was (llama.h)."""

_WARM_STEPS = 3

STATE_HEADER = struct.Struct("<4sI")
"""In front of llama.cpp's own state: magic, and what a state depends on besides its contents."""
_STATE_MAGIC = b"VMS1"


class LlamaPool:
    """See ``engine.Pool``. Used by one thread at a time.

    Attributes:
        batch_tokens: most tokens of one :meth:`decode`.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        options: EngineOptions,
        shape: PoolShape,
        vmm: Vmm | None = None,
    ) -> None:
        self.shape = shape
        self._buffers = Tagged(vmm)
        self._rollback, self._n_vocab = info.rollback, info.n_vocab
        self._n_swa = int(ll.llama_model_n_swa(model))
        self._regime = rope_regime(model, shape.cells)
        with self._buffers.region():
            context, capture = create_context(model, options, shape)
        self._context: Any = context
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
        self._memory: Any = ll.llama_get_memory(self._context)
        self.batch_tokens = int(ll.llama_n_batch(self._context))
        self._batch = Batch(self.batch_tokens)
        self._logs = library().logs

    def decode(self, batch: Sequence[tuple[int, Tokens, int, bool]]) -> None:
        """Compute one batch of at most :attr:`batch_tokens` tokens.

        Raises:
            ResourceExhausted: ``kv_full``: no free cells; nothing changed.
            Internal: ``decode_failed``: entries of several slots may be partly in the cache;
                the slots of this batch must be emptied.
        """
        if self._buffers.asleep:
            raise Internal("decode_failed", "the pool sleeps; it must be woken before")
        try:
            self._batch.fill(batch, self.shape.slots)
        except OverflowError as error:
            raise Internal("decode_failed", str(error)) from None
        # A graph that does not fit into the compute buffer gets a larger one, here.
        with self._logs.capture() as capture, self._buffers.growing():
            result = ll.llama_decode(self._context, self._batch.struct)
        if result == 0:
            return
        self._batch.last = {}
        if result == _NO_CELLS:
            raise ResourceExhausted(
                "kv_full",
                f"the pool's {self.shape.cells} cells are full",
                cells=self.shape.cells,
                tokens=int(self._batch.struct.n_tokens),
            )
        raise Internal(
            "decode_failed",
            f"llama_decode returned {result}: {capture.problem() or 'no reason given'}",
            result=result,
        )

    def sample(self, slot: int, sampler: Sampler) -> int:
        """Sample from the logits that the last :meth:`decode` computed for ``slot``; the
        sampler has then accepted the token.

        Raises:
            Internal: ``bad_logits``: the logit of what was sampled is not a number. llama.cpp
                does not notice, and takes some token.
        """
        assert isinstance(sampler, LlamaSampler)
        index = self._batch.last[slot]
        logits = ll.llama_get_logits_ith(self._context, index)
        token = sampler.pick(self._context, index, logits)
        # One that is not a number makes all of them so within a layer; one look is enough.
        if not 0 <= token < self._n_vocab or not isfinite(logits[token]):
            raise Internal(
                "bad_logits",
                "the model computed logits that are no numbers; reset the conversation, and "
                "verify the model file if it happens again",
                token=token,
            )
        return token

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
        # The token at position ``keep`` attends to itself and the n_swa - 1 before it.
        if self._rollback == "window" and self.pos_min(slot) > max(0, keep - self._n_swa + 1):
            return False
        return bool(ll.llama_memory_seq_rm(self._memory, slot, keep, -1))

    def _empty(self, slot: int) -> None:
        self._batch.last.pop(slot, None)
        ll.llama_memory_seq_rm(self._memory, slot, -1, -1)
        if self.pos_max(slot) != -1:
            self._empty_by_force(slot)

    def _empty_by_force(self, slot: int) -> None:
        """A corrupted state may have left cells at negative positions, which no removal of
        llama.cpp reaches: clear everything and put the other slots back."""
        others = [other for other in range(self.shape.slots) if other != slot]
        saved = {other: bytearray(self.state_bytes(other)) for other in others}
        for other, buffer in saved.items():
            self.get_state(other, memoryview(buffer))
        ll.llama_memory_clear(self._memory, False)
        logits = dict(self._batch.last)
        for other, buffer in saved.items():
            self.set_state(other, memoryview(buffer))
        self._batch.last = logits

    def state_bytes(self, slot: int) -> int:
        """Current size of the slot's state; changes with every decode. 0 if it is empty."""
        if self.pos_max(slot) < 0:
            return 0
        return STATE_HEADER.size + int(unannotated.llama_state_seq_get_size(self._context, slot))

    def get_state(self, slot: int, into: memoryview) -> int:
        """Copy the slot's state out; 0 and nothing written if it is empty.

        Raises:
            Internal: ``state_failed``: the buffer is too small, or llama.cpp wrote less than it
                announced; the slot is unchanged.
        """
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
        STATE_HEADER.pack_into(into, 0, _STATE_MAGIC, self._regime)
        room = size - STATE_HEADER.size
        target = (ctypes.c_uint8 * room).from_buffer(into, STATE_HEADER.size)
        with library().logs.capture() as capture, self._buffers.gathered():
            written = int(unannotated.llama_state_seq_get_data(self._context, target, room, slot))
        if written != room:
            raise Internal(
                "state_failed",
                f"saving slot {slot} wrote {written} of {room} bytes: {capture.problem()}",
                state_bytes=room,
                written_bytes=written,
            )
        return size

    def set_state(self, slot: int, blob: memoryview) -> None:
        """Replace the slot's state; an empty blob empties it.

        Raises:
            Internal: ``state_failed``: not a state, one of another model or cache type, of
                another rope regime, cut short, or no room for it; the slot is then empty.
        """
        self._empty(slot)
        if blob.nbytes == 0:
            return
        if self._buffers.asleep:
            raise _state_failed(slot, blob.nbytes, "the pool sleeps")
        if blob.nbytes <= STATE_HEADER.size:
            raise _state_failed(slot, blob.nbytes, "it is shorter than a header")
        magic, regime = STATE_HEADER.unpack_from(blob)
        if magic != _STATE_MAGIC:
            raise _state_failed(slot, blob.nbytes, "it is not a state")
        if regime != self._regime:
            raise _state_failed(slot, blob.nbytes, "its rope factors are of another pool size")
        body = np.frombuffer(blob, np.uint8, offset=STATE_HEADER.size)
        source = ctypes.cast(body.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        try:
            with library().logs.capture() as capture, self._buffers.gathered():
                read = int(
                    unannotated.llama_state_seq_set_data(self._context, source, body.nbytes, slot)
                )
        except Internal as error:
            self._empty(slot)
            raise _state_failed(slot, blob.nbytes, error.info.message) from error
        if read == body.nbytes and 0 <= self.pos_min(slot) <= self.pos_max(slot):
            return
        # Part of it may be there already, behind a pos_max of -1.
        self._empty(slot)
        why = capture.problem() or f"{read} of {body.nbytes} bytes were taken"
        raise _state_failed(slot, blob.nbytes, why)

    def warm_up(self) -> None:
        """See ``engine.Pool``. A step that repeats itself is recorded as a CUDA graph."""
        alone = min(_WARM_STEPS, self.shape.cells - 1)
        full = min(self.batch_tokens, self.shape.cells - alone)
        self.decode([(0, np.zeros(full, np.int32), 0, True)])
        for step in range(alone):
            self.decode([(0, np.zeros(1, np.int32), full + step, True)])
        self.synchronize()
        self._batch.last = {}
        ll.llama_memory_clear(self._memory, True)

    @property
    def sleepable(self) -> bool:
        """See ``engine.Pool``."""
        return self._buffers.sleepable

    def synchronize(self) -> None:
        """Wait for what it computes. A batch without logits is still under way after
        :meth:`decode`."""
        if self._context:
            ll.llama_synchronize(self._context)

    def sleep(self) -> None:
        """See ``engine.Pool``."""
        self.synchronize()
        ll.llama_memory_clear(self._memory, False)
        self._batch.last = {}
        self._buffers.sleep(keep=False)

    def wake(self) -> None:
        """See ``engine.Pool``. The memory comes back cleared: garbage in cells that are masked can
        still become NaN. (``llama_memory_clear`` would wait for all that the device does.)"""
        self._buffers.wake()

    def close(self) -> None:
        """Free the context, awake or asleep. Idempotent."""
        if self._context:
            # Memory that can sleep is unmapped without waiting for kernels that use it.
            self.synchronize()
            ll.llama_free(self._context)
            self._context = None


def _state_failed(slot: int, size: int, why: str) -> Internal:
    return Internal(
        "state_failed",
        f"cannot restore {size} bytes into slot {slot}: {why}",
        state_bytes=size,
    )
