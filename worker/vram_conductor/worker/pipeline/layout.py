"""What is transferred at once, and where in it each tensor lies. *Pure.*

A unit is one layer, or a chunk of rows of the output matrix that is no larger than the largest
layer: so what the device needs depends neither on the depth nor on the vocabulary. A unit is one
contiguous run of bytes; its tensors begin at multiples of :data:`ALIGNMENT`, in the file's own
format. The token embedding is no unit: the host looks rows of it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters
from vram_conductor.worker.pipeline.tensor_list import layer_tensors
from vram_conductor.worker.pipeline.tensor_types import Tensor

ALIGNMENT = 256
"""Bytes: what CUDA allocations are aligned to, and more than any load of a kernel needs."""

CHUNK_ROWS_MULTIPLE = 128
"""Chunks of the output matrix have a multiple of so many rows, but for the last one and where a
layer is too small for it: a tile of the matrix product is not cut in two."""


@dataclass(frozen=True)
class Placed:
    """Rows of a tensor inside a unit.

    Attributes:
        offset: of the first row, in bytes from the beginning of the unit.
        rows: of the tensor, all of them but in chunks of the output matrix.
    """

    tensor: Tensor
    offset: int
    rows: range

    @property
    def n_bytes(self) -> int:
        return len(self.rows) * self.tensor.row_bytes


@dataclass(frozen=True)
class Unit:
    """One layer or one chunk of the head.

    Attributes:
        layer: its number; None: a chunk.
        rows: of the output matrix, thus entries of the vocabulary; None: a layer.
        tensors: name → where it lies. Of a layer: attn_norm, attn_q, attn_k, attn_v,
            attn_output, ffn_norm, ffn_gate, ffn_up, ffn_down, and where the model has them
            attn_q_bias, attn_k_bias, attn_v_bias, attn_q_norm, attn_k_norm,
            post_attention_norm, post_ffw_norm. Of a chunk: output, and in the first one
            output_norm.
        n_bytes: of all, a multiple of ALIGNMENT.
    """

    name: str
    layer: int | None
    rows: range | None
    tensors: dict[str, Placed]
    n_bytes: int


def units_of(it: Hyperparameters, tensors: Mapping[str, Tensor]) -> list[Unit]:
    """The units of a pass in their order: layers, then chunks of the head.

    ``tensors`` are those of the file, checked by ``tensor_list.check_tensors``.
    """
    layers = [_layer(it, layer, tensors) for layer in range(it.n_layer)]
    norm = tensors["output_norm.weight"]
    output = tensors["token_embd.weight" if it.tied else "output.weight"]
    limit = max(layer.n_bytes for layer in layers)
    chunks = _chunks(output.rows, output.row_bytes, limit - _aligned(norm.n_bytes))
    return layers + [_chunk(index, rows, norm, output) for index, rows in enumerate(chunks)]


def fill(
    unit: Unit, read: Callable[[str, int, NDArray[np.uint8]], None], out: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Write the unit's bytes into ``out`` (at least n_bytes,) and return that part of it.

    ``read(name, first, part)`` fills a part with a tensor's bytes from ``first`` on. Gaps between
    tensors become 0.
    """
    out = out[: unit.n_bytes]
    assert len(out) == unit.n_bytes
    end = 0
    for placed in unit.tensors.values():
        size, first = placed.n_bytes, placed.rows.start * placed.tensor.row_bytes
        out[end : placed.offset] = 0
        end = placed.offset + size
        read(placed.tensor.name, first, out[placed.offset : end])
    out[end:] = 0
    return out


def _layer(it: Hyperparameters, layer: int, tensors: Mapping[str, Tensor]) -> Unit:
    found = {
        name: tensors[f"blk.{layer}.{in_file}"] for name, (in_file, _) in layer_tensors(it).items()
    }
    placed, size = _place({name: (tensor, range(tensor.rows)) for name, tensor in found.items()})
    return Unit(f"layer {layer}", layer, None, placed, size)


def _chunk(index: int, rows: range, norm: Tensor, output: Tensor) -> Unit:
    parts = {"output_norm": (norm, range(1))} if index == 0 else {}
    placed, size = _place(parts | {"output": (output, rows)})
    return Unit(f"head {index}", None, rows, placed, size)


def _place(parts: Mapping[str, tuple[Tensor, range]]) -> tuple[dict[str, Placed], int]:
    placed: dict[str, Placed] = {}
    at = 0
    for name, (tensor, rows) in parts.items():
        placed[name] = Placed(tensor, at, rows)
        at = _aligned(at + placed[name].n_bytes)
    return placed, at


def _chunks(rows: int, row_bytes: int, limit: int) -> list[range]:
    """As few as the limit allows (but at least one row each), about equally large."""
    most = max(1, limit // ALIGNMENT * ALIGNMENT // row_bytes)
    step = CHUNK_ROWS_MULTIPLE if most >= CHUNK_ROWS_MULTIPLE else 1
    most -= most % step
    count = -(-rows // most)
    each = -(-rows // count)
    each += -each % step
    return [range(first, min(first + each, rows)) for first in range(0, rows, each)]


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
