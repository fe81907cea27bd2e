"""Models of a few hundred kilobytes, written on the spot, to see how llama.cpp behaves here."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vram_conductor.worker.llama.tensors import Tensor

F16 = 1
_F32, _Q4_0, _Q8_0, _Q4_K, _Q6_K = 0, 2, 8, 12, 14
"""``ggml_type``"""

_FF, _VOCAB = 512, 512
_UINT32, _FLOAT32, _STRING = 4, 6, 8
"""Types of GGUF's values."""


@dataclass(frozen=True)
class Sample:
    """A model of one layer.

    Attributes:
        kind: ``ggml_type`` of its matrices; None: the usual quantised types.
        embd: width of the model; a multiple of 256.
        arch: qwen2 differs from llama in biases, and in how positions turn pairs.
    """

    heads: int = 4
    heads_kv: int = 2
    head: int = 64
    kind: int | None = None
    embd: int = 256
    arch: Literal["llama", "qwen2"] = "llama"

    def vectors(self) -> dict[str, int]:
        """Name → length, all f32."""
        norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
        found = {f"{name}.weight": self.embd for name in norms}
        if self.arch == "qwen2":
            found["blk.0.attn_q.bias"] = self.heads * self.head
            found["blk.0.attn_k.bias"] = found["blk.0.attn_v.bias"] = self.heads_kv * self.head
        return found

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Name → (row, rows, type)."""
        q, kv, embd = self.heads * self.head, self.heads_kv * self.head, self.embd
        found = {
            "token_embd": (embd, _VOCAB, _Q8_0),
            "blk.0.attn_q": (embd, q, _Q4_0),
            "blk.0.attn_k": (embd, kv, _Q4_K),
            "blk.0.attn_v": (embd, kv, _Q6_K),
            "blk.0.attn_output": (q, embd, _Q8_0),
            "blk.0.ffn_gate": (embd, _FF, _Q4_K),
            "blk.0.ffn_up": (embd, _FF, _Q4_0),
            "blk.0.ffn_down": (_FF, embd, _Q6_K),
        }
        if self.kind is None:
            return found
        return {name: (row, rows, self.kind) for name, (row, rows, _) in found.items()}


def write_sample(path: Path, sample: Sample) -> None:
    """Write it: no vocabulary, every weight 0. (GGUF version 3, gguf.md of ggml.)"""
    tensors: list[tuple[str, tuple[int, ...], int]] = []
    tensors += [(name, (length,), _F32) for name, length in sample.vectors().items()]
    tensors += [
        (f"{name}.weight", (row, rows), kind)
        for name, (row, rows, kind) in sample.matrices().items()
    ]
    pairs = _pairs(sample)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    at = 0
    for name, shape, kind in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += _text(name) + dims + struct.pack("<IQ", kind, at)
        at += _padded(Tensor(name, shape, kind).bytes)
    path.write_bytes(head.ljust(_padded(len(head)), b"\0") + bytes(at))


def _pairs(sample: Sample) -> list[bytes]:
    numbers = {
        "context_length": 4096,
        "embedding_length": sample.embd,
        "block_count": 1,
        "feed_forward_length": _FF,
        "attention.head_count": sample.heads,
        "attention.head_count_kv": sample.heads_kv,
        "attention.key_length": sample.head,
        "attention.value_length": sample.head,
        "rope.dimension_count": sample.head,
        "vocab_size": _VOCAB,
    }
    texts = {"general.architecture": sample.arch, "tokenizer.ggml.model": "no_vocab"}
    pairs = [_text(key) + struct.pack("<I", _STRING) + _text(text) for key, text in texts.items()]
    pairs += [
        _text(f"{sample.arch}.{key}") + struct.pack("<II", _UINT32, number)
        for key, number in numbers.items()
    ]
    epsilon = f"{sample.arch}.attention.layer_norm_rms_epsilon"
    return [*pairs, _text(epsilon) + struct.pack("<If", _FLOAT32, 1e-5)]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // 32) * 32
