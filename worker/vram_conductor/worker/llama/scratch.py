"""What a live context takes beyond its buffers, before there is one. *Pure.*

ggml-cuda gives every context a pool for the temporaries of its operations. It grows to the most
that one operation needs, in granules, and never shrinks (``ggml_cuda_pool_vmm``). Where a matrix is
multiplied by cuBLAS, the context also has a handle with its workspaces. Both go with the context,
and neither shows in a log line.

The formulas are those of llama.cpp's ``ggml/src/ggml-cuda`` (mmq.cu, ggml-cuda.cu and
fattn-common.cuh) and grow with the micro-batch, not with the filled context: the f16 copy of a
quantised cache lies in the compute buffer (``ggml_cuda_flash_attn_ext_get_alloc_size``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vram_conductor.worker.llama.sizes import GRANULE_BYTES, allocated

F32, F16, BF16 = 0, 1, 30
"""``ggml_type`` of matrices that cuBLAS multiplies as soon as there are more than 16 columns."""

MMQ_TYPES = frozenset({2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 39, 40})
"""Quantised types with a kernel of their own (``ggml_cuda_should_use_mmq``)."""

TURING = 75
_TILE = 128 * 128 * 4
_Q8_1_BYTES, _Q8_1_VALUES, _ROW_PADDING = 144, 128, 512
_FATTN_COLUMNS, _FATTN_BLOCKS_PER_SM = 64, 2

SLACK_BYTES = GRANULE_BYTES
"""Kernels that are loaded at their first use, and CUDA graphs, take a granule now and then."""


class Matrix(Protocol):
    """A tensor of the file, see ``tensors.Tensor``."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> int: ...


@dataclass(frozen=True)
class Gpu:
    """What scratch depends on.

    Attributes:
        sm_count: multiprocessors.
        compute: compute capability, 90 for 9.0.
        cublas_bytes: what a context's cuBLAS handle takes with its workspaces; measured at start.
    """

    sm_count: int
    compute: int
    cublas_bytes: int


@dataclass(frozen=True)
class Dimensions:
    """Of a model in a pool.

    Attributes:
        tokens: micro-batch.
        outputs: most logits rows of one micro-batch.
        experts_used: experts per token, 1 without experts.
        n_head: attention heads, 0 without attention.
        head_v: length of a head's value.
        n_embd_kv: length of a row of K.
        cells: KV cells.
        flash: attention runs in one kernel and makes no matrix of scores.
    """

    tokens: int
    outputs: int = 1
    experts_used: int = 1
    n_head: int = 0
    head_v: int = 0
    n_embd_kv: int = 0
    cells: int = 0
    flash: bool = True


def scratch_bytes(matrices: Iterable[Matrix], size: Dimensions, gpu: Gpu) -> int:
    """Upper bound of a context's scratch on the device, in bytes."""
    peak, cublas = _attention(size, gpu), not size.flash and size.n_head > 0
    for matrix in matrices:
        if not _multiplied(matrix):
            continue
        columns = size.outputs if matrix.name.startswith(("output.", "token_embd.")) else 0
        own, by_cublas = _multiplication(matrix, size, columns or size.tokens, gpu)
        peak, cublas = max(peak, own), cublas or by_cublas
    return allocated(peak, "cuda") + (gpu.cublas_bytes if cublas else 0) + SLACK_BYTES


def _multiplied(matrix: Matrix) -> bool:
    """Whether the tensor is a factor of a matrix product. Embeddings are looked up; the one of the
    tokens may serve as the output, too."""
    if len([n for n in matrix.shape if n > 1]) < 2 or not matrix.name.endswith(".weight"):
        return False
    looked_up = ("position_embd", "token_types", "per_layer_token_embd")
    return "conv" not in matrix.name and not matrix.name.startswith(looked_up)


def _multiplication(matrix: Matrix, size: Dimensions, columns: int, gpu: Gpu) -> tuple[int, bool]:
    """(bytes of the pool, whether cuBLAS does it)."""
    n_in, n_out = matrix.shape[:2]
    n_experts = matrix.shape[2] if len(matrix.shape) > 2 else 1
    experts = n_experts > 1
    rows = columns * (size.experts_used if experts else 1)
    if matrix.kind in MMQ_TYPES and gpu.compute >= TURING:
        padded = -(-n_in // _ROW_PADDING) * _ROW_PADDING
        quantised = (rows * padded // _Q8_1_VALUES + 128) * _Q8_1_BYTES
        ids = 3 * 4 * rows + 4 * n_experts if experts else 0
        return quantised + ids + gpu.sm_count * _TILE, False
    if columns <= 8 and not experts:
        return rows * n_in * 2, False
    if columns <= 16 and matrix.kind in (F32, F16, BF16) and not experts:
        return rows * n_in * 2, False
    converted = {F32: 0, F16: 0, BF16: 4}.get(matrix.kind, 2) * n_in * n_out
    factors = 0 if matrix.kind in (F32, BF16) else 2 * rows * (n_in + n_out)
    moved = 4 * rows * (n_in + n_out) if experts else 0
    return converted + factors + moved, True


def _attention(size: Dimensions, gpu: Gpu) -> int:
    """Partial results of flash attention; without it, scores as f16 and K as f32."""
    if size.flash:
        blocks = gpu.sm_count * _FATTN_BLOCKS_PER_SM
        tiles = blocks * _FATTN_COLUMNS * 8 * (2 + size.head_v // 2) if size.head_v else 0
        whole = 2 * 4 * size.tokens * size.n_head * size.head_v
        return tiles if gpu.compute >= TURING else whole
    return size.cells * (2 * size.tokens * size.n_head + 4 * size.n_embd_kv)
