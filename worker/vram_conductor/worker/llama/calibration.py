"""A first look at the GPU with models of a few hundred kilobytes.

The first kernels of a process take memory that stays until it ends: their code, and the local
memory of all threads together (68 MiB on an H200). Taken before ``base`` is measured, it belongs
to ``base``, instead of to whichever model happens to come first; hence batches of all sizes that
have kernels of their own, and the usual shapes of attention. The last model has plain matrices:
what its context gives back is what cuBLAS takes per context.
"""

from __future__ import annotations

import logging
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vram_conductor.protocol.values import KVType, PoolShape
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.scratch import Gpu

log = logging.getLogger(__name__)

CUBLAS_BYTES = 128 << 20
"""Taken where the measurement makes no sense, because others came or went meanwhile."""

_CUBLAS_RANGE = (1 << 20, 1 << 30)
_EMBD, _FF, _VOCAB, _CELLS = 256, 512, 512, 1024
_F32, _F16, _Q4_0, _Q8_0, _Q4_K, _Q6_K = 0, 1, 2, 8, 12, 14
_BLOCKS = {_F32: (1, 4), _F16: (1, 2), _Q4_0: (32, 18), _Q8_0: (32, 34)} | {
    _Q4_K: (256, 144),
    _Q6_K: (256, 210),
}
"""``ggml_type`` → (elements, bytes) of a block."""

ALL_SIZES = (*range(1, 9), 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 512)
"""Batches that matrix products have kernels of their own for (mmvq.cu, mmq.cu)."""

FEW_SIZES = (1, 2, 4, 8, 16, 32, 512)
"""The same for attention (fattn.cu)."""


@dataclass(frozen=True)
class Sample:
    """A Llama of one layer. ``plain``: f16 matrices, else the usual quantised types."""

    heads: int = 4
    heads_kv: int = 2
    head: int = 64
    plain: bool = False

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Name → (row, rows, type)."""
        q, kv = self.heads * self.head, self.heads_kv * self.head
        found = {
            "token_embd": (_EMBD, _VOCAB, _Q8_0),
            "blk.0.attn_q": (_EMBD, q, _Q4_0),
            "blk.0.attn_k": (_EMBD, kv, _Q4_K),
            "blk.0.attn_v": (_EMBD, kv, _Q6_K),
            "blk.0.attn_output": (q, _EMBD, _Q8_0),
            "blk.0.ffn_gate": (_EMBD, _FF, _Q4_K),
            "blk.0.ffn_up": (_EMBD, _FF, _Q4_0),
            "blk.0.ffn_down": (_FF, _EMBD, _Q6_K),
        }
        return {k: (a, b, _F16 if self.plain else kind) for k, (a, b, kind) in found.items()}


SHAPES = (Sample(4, 4), Sample(4, 1), Sample(8, 1), Sample(4, 2, 128), Sample(8, 2, 128))
"""Query heads per key: each has kernels of its own (``ggml_cuda_flash_attn_ext_mma_f16``)."""

_UINT32, _FLOAT32, _STRING = 4, 6, 8


class Device(Protocol):
    """``device.CudaDevice``, or a stand-in."""

    sm_count: int
    compute: int

    def used_bytes(self) -> int: ...


def calibrate(device: Device, options: EngineOptions) -> Gpu:
    """Warm the process up and find out what scratch depends on. Once, before anything is loaded.

    Raises:
        ConductorError: ``load_failed``, ``pool_failed``, ``decode_failed``: the GPU cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="vram-conductor-") as folder:
        path = Path(folder) / "sample.gguf"

        def run(sample: Sample, kv_type: KVType, sizes: Sequence[int]) -> int:
            write_sample(path, sample)
            return _given_back(path, kv_type, sizes, device.used_bytes, options)

        run(Sample(), "f16", ALL_SIZES)
        run(Sample(), "q8_0", FEW_SIZES)
        for sample in SHAPES:
            run(sample, "f16", FEW_SIZES)
        cublas_bytes = run(Sample(plain=True), "f16", FEW_SIZES)
    if not _CUBLAS_RANGE[0] <= cublas_bytes <= _CUBLAS_RANGE[1]:
        log.warning(
            "a context with cuBLAS seems to take %d bytes: another process came or went; "
            "%d are taken for granted",
            cublas_bytes,
            CUBLAS_BYTES,
        )
        cublas_bytes = CUBLAS_BYTES
    return Gpu(device.sm_count, device.compute, cublas_bytes)


def _given_back(
    path: Path,
    kv_type: KVType,
    sizes: Sequence[int],
    used_bytes: Callable[[], int],
    options: EngineOptions,
) -> int:
    """What a warm context of the sample gives back beyond its buffers when it is closed."""
    model = LlamaModel(str(path), path.name, options)
    try:
        pool = model.open_pool(PoolShape(cells=_CELLS, slots=1, kv_type=kv_type))
        try:
            for size in sizes:
                ids = np.zeros(min(size, options.batch_tokens), np.int32)
                pool.decode([(0, ids, 0, True)])
                pool.truncate(0, 0)
            pool.warm_up()
            before = used_bytes()
        finally:
            pool.close()
        return before - used_bytes() - pool.measured_bytes
    finally:
        model.close()


def write_sample(path: Path, sample: Sample) -> None:
    """Write it: no vocabulary, every weight 0. (GGUF version 3, gguf.md of ggml.)"""
    tensors: list[tuple[str, tuple[int, ...], int]] = [("output_norm", (_EMBD,), _F32)]
    tensors += [(f"blk.0.{name}_norm", (_EMBD,), _F32) for name in ("attn", "ffn")]
    tensors += [(name, (row, rows), kind) for name, (row, rows, kind) in sample.matrices().items()]
    pairs = _pairs(sample)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    at = 0
    for name, shape, kind in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += _text(f"{name}.weight") + dims + struct.pack("<IQ", kind, at)
        at += _padded(_size(shape, kind))
    path.write_bytes(head.ljust(_padded(len(head)), b"\0") + bytes(at))


def _pairs(sample: Sample) -> list[bytes]:
    numbers = {
        "context_length": 4096,
        "embedding_length": _EMBD,
        "block_count": 1,
        "feed_forward_length": _FF,
        "attention.head_count": sample.heads,
        "attention.head_count_kv": sample.heads_kv,
        "attention.key_length": sample.head,
        "attention.value_length": sample.head,
        "rope.dimension_count": sample.head,
        "vocab_size": _VOCAB,
    }
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    pairs = [_text(key) + struct.pack("<I", _STRING) + _text(text) for key, text in texts.items()]
    pairs += [
        _text(f"llama.{key}") + struct.pack("<II", _UINT32, number)
        for key, number in numbers.items()
    ]
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    return [*pairs, _text(epsilon) + struct.pack("<If", _FLOAT32, 1e-5)]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _size(shape: tuple[int, ...], kind: int) -> int:
    elements, size = _BLOCKS[kind]
    count = 1
    for n in shape:
        count *= n
    return count // elements * size


def _padded(size: int) -> int:
    return -(-size // 32) * 32
