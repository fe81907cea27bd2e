"""The forward pass in NumPy: every unit dequantised from its slot, then computed.

It is what the kernels are compared with, and how the pipeline runs where there is no GPU. Nothing
is kept of a unit but what it computed, so taking the formats apart is part of every pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.dequantise import dequantise
from vram_conductor.worker.pipeline.embedding import embed
from vram_conductor.worker.pipeline.forward import Batch, Capacity
from vram_conductor.worker.pipeline.kv_cache import kv_bytes
from vram_conductor.worker.pipeline.layout import Unit
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.reference import (
    attention,
    gated,
    linear,
    rms_norm,
    rope,
    store_kv,
)

Values = NDArray[np.float32]


class HostForward:
    """See :class:`vram_conductor.worker.pipeline.forward.Forward`.

    ``unit`` runs in the compute thread, everything else in the engine's, never at the same time.
    """

    def __init__(self, model: ModelFile, capacity: Capacity) -> None:
        it = model.hyperparameters
        self._model = model
        self.kv_bytes = kv_bytes(capacity, it.n_layer, it.kv_width)
        # (layer, key or value, sequence, position, kv_width)
        shape = (it.n_layer, 2, capacity.sequences, capacity.n_ctx, it.kv_width)
        self._kv: NDArray[np.float16] = np.zeros(shape, np.float16)

    @property
    def activation_bytes(self) -> int:
        """0: they come and go with every pass."""
        return 0

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._x = embed(self._model, batch.tokens)
        n_vocab = self._model.hyperparameters.n_vocab
        self._logits = np.empty((len(batch.wanted), n_vocab), np.float32)

    def unit(self, index: int, slot: NDArray[np.uint8]) -> None:
        unit = self._model.units[index]
        weights = _Weights(unit, slot)
        if unit.layer is not None:
            self._attend(unit.layer, weights)
            self._feed_forward(weights)
            return
        if "output_norm" in unit.tensors:
            x = self._x[self._batch.wanted]
            self._x = rms_norm(x, weights["output_norm"], self._model.hyperparameters.norm_eps)
        assert unit.rows is not None
        self._logits[:, unit.rows.start : unit.rows.stop] = linear(self._x, weights["output"])

    def logits(self) -> Values:
        return self._logits

    def best(self) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self._logits.argmax(axis=1).astype(np.int32)
        return found

    def close(self) -> None:
        self._kv = np.zeros(0, np.float16)

    def _attend(self, layer: int, weights: _Weights) -> None:
        it, batch = self._model.hyperparameters, self._batch
        h = rms_norm(self._x, weights["attn_norm"], it.norm_eps)
        q = self._heads(h, "q", weights)
        k = self._heads(h, "k", weights)
        v = linear(h, weights["attn_v"], weights.get("attn_v_bias"))
        turn = it.rope(layer)
        q, k = (
            rope(x, batch.positions, turn.inverse_frequencies, turn.magnitude, it.rope_pairs)
            for x in (q, k)
        )
        keys, values = self._kv[layer]
        at = batch.positions, batch.sequences
        store_kv(k.reshape(len(batch), it.kv_width), v, keys, values, *at)
        mixed = attention(q, keys, values, *at, it.n_head_kv, it.attention_scale, it.window(layer))
        self._add(linear(mixed, weights["attn_output"]), weights.get("post_attention_norm"))

    def _heads(self, h: Values, name: str, weights: _Weights) -> Values:
        """Queries or keys (tokens, heads, head_dim), normalised where the model does."""
        it = self._model.hyperparameters
        x = linear(h, weights[f"attn_{name}"], weights.get(f"attn_{name}_bias"))
        x = x.reshape(len(h), -1, it.head_dim)
        norm = weights.get(f"attn_{name}_norm")
        return x if norm is None else rms_norm(x, norm, it.norm_eps)

    def _feed_forward(self, weights: _Weights) -> None:
        it = self._model.hyperparameters
        h = rms_norm(self._x, weights["ffn_norm"], it.norm_eps)
        gate, up = linear(h, weights["ffn_gate"]), linear(h, weights["ffn_up"])
        y = linear(gated(gate, up, it.activation), weights["ffn_down"])
        self._add(y, weights.get("post_ffw_norm"))

    def _add(self, y: Values, norm: Values | None) -> None:
        """To the residual stream, normalised where the model does."""
        eps = self._model.hyperparameters.norm_eps
        self._x = self._x + y if norm is None else rms_norm(y, norm, eps, add=self._x)


class _Weights:
    """A unit's tensors by name, dequantised when they are asked for: one at a time in memory."""

    def __init__(self, unit: Unit, slot: NDArray[np.uint8]) -> None:
        self._unit = unit
        self._slot = slot

    def __getitem__(self, name: str) -> Values:
        placed = self._unit.tensors[name]
        data = self._slot[placed.offset : placed.offset + placed.n_bytes]
        tensor = placed.tensor
        values = dequantise(data, tensor.type, len(placed.rows), tensor.columns)
        return values[0] if tensor.rows == 1 else values

    def get(self, name: str) -> Values | None:
        """None where the model has no such tensor."""
        return self[name] if name in self._unit.tensors else None
