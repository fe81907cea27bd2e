"""Tiny GGUFs with random weights in every tensor type that the layer pipeline computes with.

Quantised matrices are random blocks, not quantised numbers, so that every bit of a format is in
use. The same weights can be written as F32 (``as_f32``; taken apart by the gguf package): llama.cpp
rounds the activations to 8 bits where weights are quantised, and to nothing where they are F32.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.tensor_types import TensorType

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Quantised:
    """One model. ``kind``: type of its matrices; ``as_f32``: these values, but written as F32.

    ``scaling`` is that of the rotary embedding, for four times the trained context. Models without
    a head of their own (``tied``) use the embedding's rows. ``corrupt``: a layer that is drawn
    anew.
    """

    arch: Literal["llama", "qwen2", "gemma3"] = "llama"
    kind: TensorType = TensorType.F32
    as_f32: bool = False
    seed: int = 1
    n_vocab: int = 320
    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 512
    n_swa: int = 24
    n_ctx_train: int = 512
    scaling: Literal["", "linear", "yarn", "llama3"] = ""
    tied: bool = False
    corrupt: int | None = None


_VERSION = 2
_GAINS = {
    "token_embd": 16.0,
    "attn_output": 1.0,
    "attn": 1.3,
    "output": 6.0,
    "ffn_down": 0.6,
    "ffn": 1.5,
}
"""The layers together add about as much as the embedding: what comes out depends on both."""

_GEMMA_GAINS = {"token_embd": 1.0, "attn": 1.0, "output": 6.0, "ffn": 1.0}
"""Gemma scales its embeddings by sqrt(n_embd) and its layers' results to 1."""


def make_quantised(
    spec: Quantised, folder: Path | None = None, head: NDArray[np.float32] | None = None
) -> Path:
    """Write the model (once; the file name is a digest) and return its path.

    ``head``: the output head (n_vocab, n_embd), written as Q8_0, instead of random blocks.
    """
    folder = folder or Path(tempfile.gettempdir()) / "vram-conductor-test-models"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps([asdict(spec), _VERSION]).encode())
    if head is not None:
        digest.update(head.tobytes())
    key = digest.hexdigest()[:16]
    path = folder / f"quantised-{spec.arch}-{spec.kind.name}-{key}.gguf"
    if not path.exists():
        part = path.with_suffix(f".part{np.random.default_rng().integers(1 << 60)}")
        _Writer(spec, part, head).write()
        part.rename(path)
    return path


class _Writer:
    def __init__(self, spec: Quantised, path: Path, head: NDArray[np.float32] | None) -> None:
        self.spec = spec
        self.head = head
        self.gguf = gguf.GGUFWriter(path, spec.arch)
        self.gains = _GEMMA_GAINS if spec.arch == "gemma3" else _GAINS

    def write(self) -> None:
        self._metadata()
        spec = self.spec
        self._rng = np.random.default_rng(spec.seed)
        self.matrix("token_embd", spec.n_vocab, spec.n_embd)
        self.vector("output_norm.weight", spec.n_embd)
        if self.head is not None:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(self.head, kind)
            self.gguf.add_tensor("output.weight", data, raw_dtype=kind)
        elif not spec.tied:
            self.matrix("output", spec.n_vocab, spec.n_embd)
        if spec.scaling == "llama3":
            # Fast pairs stay, slow ones are stretched, as the converter writes it.
            divisors = np.geomspace(0.25, 16, spec.head_dim // 2).clip(1, 4)
            self.gguf.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        for layer in range(spec.n_layer):
            self._rng = np.random.default_rng([spec.seed, layer, int(layer == spec.corrupt)])
            self._layer(f"blk.{layer}")
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()

    def _metadata(self) -> None:
        spec, writer = self.spec, self.gguf
        writer.add_context_length(spec.n_ctx_train)
        writer.add_embedding_length(spec.n_embd)
        writer.add_block_count(spec.n_layer)
        writer.add_vocab_size(spec.n_vocab)
        writer.add_feed_forward_length(spec.n_ff)
        writer.add_head_count(spec.n_head)
        writer.add_head_count_kv(spec.n_head_kv)
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
        writer.add_rope_dimension_count(spec.head_dim)
        writer.add_rope_freq_base(10_000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("no_vocab")
        if spec.arch == "gemma3":
            writer.add_sliding_window(spec.n_swa)
        if spec.scaling in ("linear", "yarn"):
            kind = gguf.RopeScalingType[spec.scaling.upper()]
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(spec.n_ctx_train // 4)

    def _layer(self, at: str) -> None:
        spec = self.spec
        embd, q, kv, ff = (
            spec.n_embd,
            spec.n_head * spec.head_dim,
            spec.n_head_kv * spec.head_dim,
            spec.n_ff,
        )
        for name, rows, columns in (
            ("attn_q", q, embd),
            ("attn_k", kv, embd),
            ("attn_v", kv, embd),
            ("attn_output", embd, q),
            ("ffn_gate", ff, embd),
            ("ffn_up", ff, embd),
            ("ffn_down", embd, ff),
        ):
            self.matrix(f"{at}.{name}", rows, columns)
        self.vector(f"{at}.attn_norm.weight", embd)
        self.vector(f"{at}.ffn_norm.weight", embd)
        if spec.arch == "qwen2":
            for name, n in (("q", q), ("k", kv), ("v", kv)):
                self.vector(f"{at}.attn_{name}.bias", n, centre=0.0, spread=0.5)
        if spec.arch == "gemma3":
            # Larger than 1: attention would see all alike.
            self.vector(f"{at}.attn_q_norm.weight", spec.head_dim, centre=1.6)
            self.vector(f"{at}.attn_k_norm.weight", spec.head_dim, centre=1.6)
            self.vector(f"{at}.post_attention_norm.weight", embd, centre=0.3)
            self.vector(f"{at}.post_ffw_norm.weight", embd, centre=0.3)

    def vector(self, name: str, n: int, centre: float = 1.0, spread: float = 0.1) -> None:
        self.gguf.add_tensor(name, self._rng.normal(centre, spread, n).astype(np.float32))

    def matrix(self, name: str, rows: int, columns: int) -> None:
        gain = next(gain for part, gain in self.gains.items() if part in name)
        kind = gguf.GGMLQuantizationType(int(self.spec.kind))
        spread = np.full(rows, gain / math.sqrt(columns))
        data = random_rows(self._rng, self.spec.kind, columns, spread)
        if self.spec.as_f32:
            data, kind = as_f32(data, kind).view(np.uint8), gguf.GGMLQuantizationType.F32
        self.gguf.add_tensor(f"{name}.weight", data, raw_dtype=kind)


def as_f32(data: Bytes, kind: Any) -> NDArray[np.float32]:
    """The gguf package's reading of quantised rows."""
    values: NDArray[np.float32] = gguf.quants.dequantize(data, kind)
    return values


def random_rows(
    rng: np.random.Generator, kind: TensorType, columns: int, spread: NDArray[Any]
) -> Bytes:
    """Rows of random blocks, (rows, bytes): values of row i spread by spread[i] around 0."""
    rows = len(spread)
    if kind in (TensorType.F32, TensorType.F16):
        plain = np.float32 if kind == TensorType.F32 else np.float16
        values: NDArray[Any] = (rng.normal(0, 1, (rows, columns)) * spread[:, None]).astype(plain)
        return values.view(np.uint8)
    per_row = columns // kind.block_values
    blocks = rng.integers(0, 256, (rows, per_row, kind.block_bytes), dtype=np.uint8)
    # Every block has a scale of its own, some of them negative.
    scale = rng.uniform(0.6, 1.4, (rows, per_row)) * rng.choice([-1, 1], (rows, per_row))
    scale *= spread[:, None] / _STD[kind]
    if kind == TensorType.Q4_K:
        scales = rng.integers(0, 64, (rows, per_row, 8))
        offsets = np.clip(scales + rng.integers(-6, 7, scales.shape), 0, 63)
        blocks[:, :, 4:16] = _six_bits(scales, offsets)
    for at, factor in _SCALES[kind].items():
        blocks[:, :, at : at + 2] = (scale * factor).astype(np.float16)[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _six_bits(scales: NDArray[Any], offsets: NDArray[Any]) -> Bytes:
    """8 scales and 8 offsets of 6 bits in 12 bytes, as Q4_K packs them (ggml-quants.c)."""
    low, high = (
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        offsets[..., :4] | offsets[..., 4:] >> 4 << 6,
    )
    nibbles = scales[..., 4:] & 15 | (offsets[..., 4:] & 15) << 4
    return np.concatenate((low, high, nibbles), axis=-1).astype(np.uint8)


_SCALES = {
    TensorType.Q8_0: {0: 1.0},
    TensorType.Q4_0: {0: 1.0},
    TensorType.Q4_1: {0: 1.0, 2: -7.5},
    TensorType.Q5_0: {0: 1.0},
    TensorType.Q4_K: {0: 1.0, 2: 7.5},
    TensorType.Q6_K: {208: 1.0},
}
"""Where a block's float16 numbers are, and how they make the mean 0: each in units of the scale."""

_STD = {
    TensorType.Q8_0: math.sqrt((256**2 - 1) / 12),
    TensorType.Q4_0: math.sqrt((16**2 - 1) / 12),
    TensorType.Q4_1: math.sqrt((16**2 - 1) / 12),
    TensorType.Q5_0: math.sqrt((32**2 - 1) / 12),
    # Scales of 0 to 63, of -128 to 127.
    TensorType.Q4_K: math.sqrt((16**2 - 1) / 12 * (64**2 / 3) + 7.5**2 * (13**2 - 1) / 12),
    TensorType.Q6_K: math.sqrt((64**2 - 1) / 12) * math.sqrt((256**2 - 1) / 12),
}
"""Of the values of random blocks with the scale 1, roughly."""
