"""Models of a few hundred kilobytes, written on the spot, to see how llama.cpp behaves here."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.worker.llama.tensors import Tensor

F16 = 1
_F32, _Q4_0, _Q8_0, _Q4_K, _Q6_K = 0, 2, 8, 12, 14
"""``ggml_type``"""

_EMBD, _FF, _VOCAB = 256, 512, 512
_UINT32, _FLOAT32, _STRING = 4, 6, 8
"""Types of GGUF's values."""


@dataclass(frozen=True)
class Sample:
    """A Llama of one layer. ``kind``: ``ggml_type`` of its matrices; None: the usual quantised
    types."""

    heads: int = 4
    heads_kv: int = 2
    head: int = 64
    kind: int | None = None

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
        if self.kind is None:
            return found
        return {name: (row, rows, self.kind) for name, (row, rows, _) in found.items()}


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
        at += _padded(Tensor(name, shape, kind).bytes)
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


def _padded(size: int) -> int:
    return -(-size // 32) * 32
