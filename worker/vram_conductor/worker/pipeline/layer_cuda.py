"""Which kernels compute a unit, and on what.

A launch is prepared once for each unit, slot and number of tokens; after that a pass only puts
hundreds of them on the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vram_conductor.worker.pipeline import launch_geometry as geometry
from vram_conductor.worker.pipeline.attention_plan import AttentionMemory, Heads, Part, launches
from vram_conductor.worker.pipeline.forward import Capacity
from vram_conductor.worker.pipeline.gpu import Argument, Gpu, Launch
from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters
from vram_conductor.worker.pipeline.kernel_source import kernel_source, matvec_name
from vram_conductor.worker.pipeline.kv_cache import kv_bytes
from vram_conductor.worker.pipeline.launch_geometry import Geometry
from vram_conductor.worker.pipeline.layout import Unit
from vram_conductor.worker.pipeline.matmul_geometry import matmul, to_half

SOURCES = (
    "matvec.cu",
    "matmul.cu",
    "norm.cu",
    "rope.cu",
    "gated.cu",
    "argmax.cu",
)
TENSOR_CORES_SINCE = (8, 0)
"""Compute capability from which on ``matmul.cu`` uses them."""

_ACTIVATIONS = {"silu": 0, "gelu": 1}


class UnitKernels:
    """The launches of all units of one model.

    Args:
        units: all of the model's. Only what they need is compiled.
        at: device addresses of the activations, by the names of
            :func:`vram_conductor.worker.pipeline.activations.activations`.
        kv: device address of the KV cache.
    """

    def __init__(
        self,
        gpu: Gpu,
        it: Hyperparameters,
        units: Sequence[Unit],
        capacity: Capacity,
        at: Mapping[str, int],
        kv: int,
    ) -> None:
        self._it = it
        self._capacity = capacity
        self._at = at
        self._kv = kv
        self.heads = Heads(it.n_head, it.n_head_kv, it.head_dim)
        self._multiprocessors = gpu.multiprocessors
        self._tensor_cores = gpu.capability >= TENSOR_CORES_SINCE
        # By themselves: they are the only ones that are made for one model.
        self._attention = gpu.module(kernel_source("attention.cu", defines=self.heads.defines))
        tensors = [placed.tensor for unit in units for placed in unit.tensors.values()]
        kinds = {tensor.type for tensor in tensors if tensor.rows > 1}
        self._module = gpu.module(kernel_source(*SOURCES, kinds=kinds))

    def before_attention(self, unit: Unit, slot: int, tokens: int) -> Iterator[Launch]:
        """Queries, keys and values, the latter two into the cache."""
        it, at = self._it, self._at
        assert unit.layer is not None
        yield self._norm(at["x"], self._weight(unit, slot, "attn_norm"), at["h"], tokens)
        yield from self._halves("h", it.n_embd, tokens)
        for name in ("q", "k", "v"):
            yield self._linear(unit, slot, f"attn_{name}", "h", at[name], tokens)
        turn = it.rope(unit.layer)
        frequency = at[f"frequency_{int(it.is_windowed(unit.layer))}"]
        for name, heads in (("q", it.n_head), ("k", it.n_head_kv)):
            weight = self._weight(unit, slot, f"attn_{name}_norm")
            if weight:
                yield self._norm(at[name], weight, at[name], tokens * heads, width=it.head_dim)
            yield self._launch(
                "rope",
                geometry.rope(tokens, heads, turn.n_rot),
                at[name],
                at["position"],
                frequency,
                np.float32(turn.magnitude),
                *map(np.int32, (tokens, heads, it.head_dim, turn.n_rot)),
                np.int32(it.rope_pairs == "halves"),
            )
        size = geometry.values(tokens * it.kv_width)
        args: list[Argument] = [
            *(at["k"], at["v"], *self._caches(unit.layer), at["position"], at["sequence"]),
            *map(np.int32, (tokens, self._capacity.n_ctx, it.kv_width)),
        ]
        yield self._attention.prepare("store_kv", size.grid, size.block, args)

    def attention(self, layer: int, parts: Sequence[Part]) -> Iterator[Launch]:
        """Of a batch that was divided into ``parts``."""
        it, at = self._it, self._at
        keys, values = self._caches(layer)
        memory = AttentionMemory(
            at["q"], keys, values, at["mixed"], at["scratch"], at["position"], at["sequence"]
        )
        n_ctx, scale = self._capacity.n_ctx, it.attention_scale
        for launch in launches(parts, self.heads, memory, n_ctx, scale, it.window(layer)):
            size = launch.geometry
            yield self._attention.prepare(launch.kernel, size.grid, size.block, launch.arguments)

    def after_attention(self, unit: Unit, slot: int, tokens: int) -> Iterator[Launch]:
        """The attention's result into the residual stream, and the feed-forward part."""
        it, at = self._it, self._at
        yield from self._halves("mixed", it.q_width, tokens)
        yield from self._add(unit, slot, "attn_output", "mixed", "post_attention_norm", tokens)
        yield self._norm(at["x"], self._weight(unit, slot, "ffn_norm"), at["h"], tokens)
        yield from self._halves("h", it.n_embd, tokens)
        for name in ("gate", "up"):
            yield self._linear(unit, slot, f"ffn_{name}", "h", at[name], tokens)
        yield self._launch(
            "gated",
            geometry.values(tokens * it.n_ff),
            at["gate"],
            at["up"],
            at["gate"],
            np.int64(tokens * it.n_ff),
            np.int32(_ACTIVATIONS[it.activation]),
        )
        yield from self._halves("gate", it.n_ff, tokens)
        yield from self._add(unit, slot, "ffn_down", "gate", "post_ffw_norm", tokens)

    def wanted(
        self, unit: Unit, slot: int, runs: Sequence[tuple[int, int, int]]
    ) -> Iterator[Launch]:
        """The last norm, of the tokens whose logits are wanted: runs of (first, place, count)."""
        at, row_bytes = self._at, 4 * self._it.n_embd
        weight = self._weight(unit, slot, "output_norm")
        for first, place, count in runs:
            source, target = at["x"] + first * row_bytes, at["h"] + place * row_bytes
            yield self._norm(source, weight, target, count)
        yield from self._halves("h", self._it.n_embd, sum(count for _, _, count in runs))

    def head(self, unit: Unit, slot: int, wanted: int) -> Iterator[Launch]:
        """A chunk's logits of so many tokens, and which of all until here is the largest."""
        at = self._at
        assert unit.rows is not None
        logits = at["logits"] + 4 * wanted * unit.rows.start
        yield self._linear(unit, slot, "output", "h", logits, wanted)
        yield self._launch(
            "argmax",
            geometry.argmax(wanted),
            logits,
            at["best"],
            at["best_token"],
            np.int32(unit.rows.start),
            np.int32(len(unit.rows)),
        )

    def _add(
        self, unit: Unit, slot: int, name: str, x: str, norm: str, tokens: int
    ) -> Iterator[Launch]:
        """A product, normalised where the model does, onto the residual stream."""
        at, weight = self._at, self._weight(unit, slot, norm)
        if not weight:
            yield self._linear(unit, slot, name, x, at["x"], tokens, add=at["x"])
            return
        yield self._linear(unit, slot, name, x, at["h"], tokens)
        yield self._norm(at["h"], weight, at["x"], tokens, add=at["x"])

    def _norm(
        self, x: int, weight: int, y: int, rows: int, *, add: int = 0, width: int = 0
    ) -> Launch:
        width = width or self._it.n_embd
        return self._launch(
            "rms_norm",
            geometry.rms_norm(rows, width),
            *(x, weight, add, y),
            np.int32(rows),
            np.int32(width),
            np.float32(self._it.norm_eps),
        )

    def _halves(self, x: str, columns: int, tokens: int) -> Iterator[Launch]:
        """What a product of several tokens reads."""
        at = self._at
        if tokens > 1:
            yield self._launch(
                "to_half",
                to_half(tokens),
                *(at[x], at["half"], at["scale"]),
                np.int32(tokens),
                np.int32(columns),
            )

    def _linear(
        self, unit: Unit, slot: int, name: str, x: str, y: int, tokens: int, *, add: int = 0
    ) -> Launch:
        """``y`` (tokens, rows) = weight · x + bias + add; with several tokens, of ``half``."""
        placed = unit.tensors[name]
        weight, bias = slot + placed.offset, self._weight(unit, slot, f"{name}_bias")
        rows, kind = len(placed.rows), placed.tensor.type
        sizes = np.int32(rows), np.int32(placed.tensor.columns)
        if tokens == 1:
            size = geometry.matvec(rows)
            return self._launch(matvec_name(kind), size, weight, self._at[x], y, bias, add, *sizes)
        found = matmul(
            kind,
            rows,
            tokens,
            multiprocessors=self._multiprocessors,
            tensor_cores=self._tensor_cores,
        )
        factors = self._at["half"], self._at["scale"]
        args = weight, *factors, y, bias, add, *sizes, np.int32(tokens)
        return self._launch(found.kernel, found.geometry, *args)

    def _launch(self, kernel: str, size: Geometry, *args: Argument) -> Launch:
        return self._module.prepare(kernel, size.grid, size.block, args, size.shared_bytes)

    def _weight(self, unit: Unit, slot: int, name: str) -> int:
        """Its address; null where the model has no such tensor."""
        return slot + unit.tensors[name].offset if name in unit.tensors else 0

    def _caches(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's keys and of its values."""
        half_bytes = kv_bytes(self._capacity, 1, self._it.kv_width) // 2
        keys = self._kv + 2 * layer * half_bytes
        return keys, keys + half_bytes
