"""The forward pass on a GPU: kernels on the compute stream, activations and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.activations import Activations, activations, runs
from vram_conductor.worker.pipeline.attention_plan import Heads, Part, plan, scratch_bytes
from vram_conductor.worker.pipeline.embedding import embed
from vram_conductor.worker.pipeline.forward import Batch, Capacity
from vram_conductor.worker.pipeline.gpu import DeviceMemory, Gpu, Launch, PinnedMemory, Stream
from vram_conductor.worker.pipeline.kv_cache import kv_bytes
from vram_conductor.worker.pipeline.layer_cuda import UnitKernels
from vram_conductor.worker.pipeline.model_file import ModelFile

LAUNCHES_KEPT = 4096
"""Lists of prepared launches; all are dropped when there are more."""


def forward_bytes(model: ModelFile, capacity: Capacity, multiprocessors: int) -> tuple[int, int]:
    """What :class:`CudaForward` allocates on such a device: KV cache, activations. *Pure.*"""
    it = model.hyperparameters
    cache = kv_bytes(capacity, it.n_layer, it.kv_width)
    return cache, _block(model, capacity, multiprocessors).n_bytes


def _block(model: ModelFile, capacity: Capacity, multiprocessors: int) -> Activations:
    it = model.hyperparameters
    heads = Heads(it.n_head, it.n_head_kv, it.head_dim)
    return activations(it, capacity, scratch_bytes(heads, capacity.tokens_max, multiprocessors))


class CudaForward:
    """See :class:`vram_conductor.worker.pipeline.forward.Forward`. ``slot`` is a device address.

    Args:
        stream: of the kernels.

    Raises:
        ResourceExhausted: ``device_memory_short``, ``host_memory_short``, ``pin_refused``.
        FailedPrecondition: ``nvrtc_missing``.
    """

    def __init__(self, gpu: Gpu, stream: Stream, model: ModelFile, capacity: Capacity) -> None:
        it = model.hyperparameters
        block = _block(model, capacity, gpu.multiprocessors)
        self.kv_bytes, self.activation_bytes = forward_bytes(model, capacity, gpu.multiprocessors)
        self._gpu = gpu
        self._stream = stream
        self._model = model
        self._memory: list[DeviceMemory] = []
        self._pinned: list[PinnedMemory] = []
        self._launches: dict[Hashable, list[Launch]] = {}
        try:
            memory, kv = self._allocate(block.n_bytes), self._allocate(self.kv_bytes)
            self._at = {name: memory + offset for name, offset in block.offsets.items()}
            self._kernels = UnitKernels(gpu, it, model.units, capacity, self._at, kv)
            tokens, wanted = capacity.tokens_max, capacity.wanted_max
            self._x = self._host(tokens * it.n_embd).view(np.float32)
            self._position = self._host(tokens).view(np.int32)
            self._sequence = self._host(tokens).view(np.int32)
            self._logits = self._host(wanted * it.n_vocab).view(np.float32)
            self._best = self._host(wanted).view(np.int32)
            for which, turn in enumerate(it.ropes):
                gpu.copy_to_device(self._at[f"frequency_{which}"], turn.inverse_frequencies, stream)
        except BaseException:
            self.close()
            raise

    def begin(self, batch: Batch) -> None:
        it, n = self._model.hyperparameters, len(batch)
        # The last batch's copies must have been made before its host memory is used again.
        self._stream.synchronise()
        self._batch = batch
        x = self._x[: n * it.n_embd]
        x.reshape(n, it.n_embd)[:] = embed(self._model, batch.tokens)
        self._position[:n] = batch.positions
        self._sequence[:n] = batch.sequences
        for name, array in (
            ("x", x),
            ("position", self._position[:n]),
            ("sequence", self._sequence[:n]),
        ):
            self._gpu.copy_to_device(self._at[name], array, self._stream)
        everything = self._plan(0)
        windowed = self._plan(it.sliding_window) if it.sliding_window else everything
        self._parts = everything, windowed

    def unit(self, index: int, slot: int) -> None:
        unit, n, wanted = self._model.units[index], len(self._batch), len(self._batch.wanted)
        kernels, layer = self._kernels, unit.layer
        if layer is not None:
            parts = self._parts[self._model.hyperparameters.is_windowed(layer)]
            self._put(("in", index, slot, n), lambda: kernels.before_attention(unit, slot, n))
            self._put(("mix", index, parts), lambda: kernels.attention(layer, parts))
            self._put(("out", index, slot, n), lambda: kernels.after_attention(unit, slot, n))
        elif wanted:
            if "output_norm" in unit.tensors:
                rows = tuple(runs(self._batch.wanted))
                self._put(("norm", index, slot, rows), lambda: kernels.wanted(unit, slot, rows))
            self._put(("head", index, slot, wanted), lambda: kernels.head(unit, slot, wanted))

    def logits(self) -> NDArray[np.float32]:
        wanted, n_vocab = len(self._batch.wanted), self._model.hyperparameters.n_vocab
        flat = self._logits[: wanted * n_vocab]
        self._fetch(flat, "logits")
        found = np.empty((wanted, n_vocab), np.float32)
        for rows in (unit.rows for unit in self._model.units if unit.rows is not None):
            part = flat[wanted * rows.start : wanted * rows.stop]
            found[:, rows.start : rows.stop] = part.reshape(wanted, len(rows))
        return found

    def best(self) -> NDArray[np.int32]:
        """The entry with the largest logit of each wanted token (len(batch.wanted),), the first of
        several; instead of :meth:`logits`, which are much more to copy."""
        found = self._best[: len(self._batch.wanted)]
        self._fetch(found, "best_token")
        return found.copy()

    def close(self) -> None:
        self._launches.clear()
        for memory in self._memory:
            memory.free()
        for pinned in self._pinned:
            pinned.free()

    def _plan(self, window: int) -> tuple[Part, ...]:
        batch, heads = self._batch, self._kernels.heads
        parts = plan(batch.positions, batch.sequences, heads, window, self._gpu.multiprocessors)
        return tuple(parts)

    def _put(self, key: Hashable, make: Callable[[], Iterable[Launch]]) -> None:
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= LAUNCHES_KEPT:
                self._launches.clear()
            launches = self._launches[key] = list(make())
        for launch in launches:
            launch.on(self._stream)

    def _fetch(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> None:
        if array.size:
            self._gpu.copy_to_host(array, self._at[name], self._stream)
        self._stream.synchronise()

    def _allocate(self, n_bytes: int) -> int:
        self._memory.append(self._gpu.allocate(n_bytes))
        return self._memory[-1].address

    def _host(self, count: int) -> NDArray[np.uint8]:
        """Pinned, four bytes for each."""
        self._pinned.append(self._gpu.pinned(4 * count))
        return self._pinned[-1].array
