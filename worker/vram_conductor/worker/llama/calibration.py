"""A first look at the GPU with two models of a few hundred kilobytes.

The first kernels of a process take memory that stays until it ends: their code, and the local
memory of all threads together (68 MiB on an H200). Taken before ``base`` is measured, it belongs
to ``base``, instead of to whichever model happens to come first. The second model has plain
matrices: what its context gives back is what cuBLAS takes per context.
"""

from __future__ import annotations

import logging
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from vram_conductor.protocol.values import KVType, PoolShape
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.scratch import Gpu

log = logging.getLogger(__name__)

CUBLAS_BYTES = 128 << 20
"""Taken where the measurement makes no sense, because others came or went meanwhile."""

_CUBLAS_RANGE = (1 << 20, 1 << 30)
_EMBD, _HEADS, _HEADS_KV, _FF, _VOCAB = 256, 4, 2, 512, 512
_F32, _F16, _Q4_0, _Q8_0, _Q4_K, _Q6_K = 0, 1, 2, 8, 12, 14
_BLOCKS = {_F32: (1, 4), _F16: (1, 2), _Q4_0: (32, 18), _Q8_0: (32, 34)} | {
    _Q4_K: (256, 144),
    _Q6_K: (256, 210),
}
"""``ggml_type`` → (elements, bytes) of a block."""

_KV = _EMBD // _HEADS * _HEADS_KV
_MATRICES = {
    "token_embd": (_EMBD, _VOCAB, _Q8_0),
    "blk.0.attn_q": (_EMBD, _EMBD, _Q4_0),
    "blk.0.attn_k": (_EMBD, _KV, _Q4_K),
    "blk.0.attn_v": (_EMBD, _KV, _Q6_K),
    "blk.0.attn_output": (_EMBD, _EMBD, _Q8_0),
    "blk.0.ffn_gate": (_EMBD, _FF, _Q4_K),
    "blk.0.ffn_up": (_EMBD, _FF, _Q4_0),
    "blk.0.ffn_down": (_FF, _EMBD, _Q6_K),
}
"""Name → (row, rows, type in the quantised model)."""

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
        quantised, plain = Path(folder) / "quantised.gguf", Path(folder) / "plain.gguf"
        write_sample(quantised, plain=False)
        write_sample(plain, plain=True)
        for kv_type in ("f16", "q8_0"):
            _given_back(quantised, kv_type, device.used_bytes, options)
        cublas_bytes = _given_back(plain, "f16", device.used_bytes, options)
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
    path: Path, kv_type: KVType, used_bytes: Callable[[], int], options: EngineOptions
) -> int:
    """What a warm context of the sample gives back beyond its buffers when it is closed."""
    model = LlamaModel(str(path), path.name, options)
    try:
        pool = model.open_pool(PoolShape(cells=1024, slots=1, kv_type=kv_type))
        try:
            pool.warm_up()
            before = used_bytes()
        finally:
            pool.close()
        return before - used_bytes() - pool.measured_bytes
    finally:
        model.close()


def write_sample(path: Path, *, plain: bool) -> None:
    """A Llama of one layer and without a vocabulary, every weight of it 0.

    ``plain``: f16 matrices, else the usual quantised types. (GGUF version 3, gguf.md of ggml.)
    """
    tensors: list[tuple[str, tuple[int, ...], int]] = [("output_norm", (_EMBD,), _F32)]
    tensors += [(f"blk.0.{name}_norm", (_EMBD,), _F32) for name in ("attn", "ffn")]
    for name, (row, rows, kind) in _MATRICES.items():
        tensors.append((name, (row, rows), _F16 if plain else kind))
    pairs = _pairs()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    at = 0
    for name, shape, kind in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += _text(f"{name}.weight") + dims + struct.pack("<IQ", kind, at)
        at += _padded(_size(shape, kind))
    path.write_bytes(head.ljust(_padded(len(head)), b"\0") + bytes(at))


def _pairs() -> list[bytes]:
    numbers = {
        "context_length": 4096,
        "embedding_length": _EMBD,
        "block_count": 1,
        "feed_forward_length": _FF,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _HEADS_KV,
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
