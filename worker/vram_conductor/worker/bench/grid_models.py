"""Random-weight GGUFs that differ in what memory depends on: architecture, types, heads, window.

They are as wide as real models of half to one billion parameters and have fewer layers, so that
all of them are written in a few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.bench.random_models import load_gguf

_VERSION = 1
_STD_Q4, _STD_Q8 = math.sqrt((16**2 - 1) / 12), math.sqrt((256**2 - 1) / 12)
_BLOCKS = {"q4_0": (32, 18), "q8_0": (32, 34), "q4_K": (256, 144), "f16": (1, 2), "f32": (1, 4)}


@dataclass(frozen=True)
class GridModel:
    """One model: dimensions as in GGUF metadata. ``kind``: type of its matrices."""

    name: str
    arch: Literal["llama", "qwen2", "gemma3", "mamba"]
    kind: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head: int
    n_ff: int
    n_vocab: int
    tied: bool = True
    window: int = 0

    def small(self) -> GridModel:
        """The same on a machine without a GPU: two layers, a short vocabulary."""
        return replace(self, name=f"{self.name}-small", n_layer=2, n_vocab=1024)


GRID_MODELS = (
    GridModel("360m-q4_0", "llama", "q4_0", 16, 960, 15, 5, 64, 2560, 49_152),
    GridModel("0.5b-q8_0", "qwen2", "q8_0", 12, 896, 14, 2, 64, 4864, 151_936),
    GridModel("1b-q4_K", "llama", "q4_K", 8, 2048, 16, 4, 128, 8192, 32_000, tied=False),
    GridModel("0.3b-f16", "llama", "f16", 8, 1024, 16, 8, 64, 2816, 32_000, tied=False),
    GridModel("1b-window", "gemma3", "q8_0", 12, 1152, 4, 1, 256, 6912, 65_536, window=512),
    GridModel("mamba-f32", "mamba", "f32", 8, 768, 0, 0, 0, 0, 50_272),
)


def make_grid_model(model: GridModel, folder: Path) -> Path:
    """Write it, once; returns its path.

    Raises:
        FailedPrecondition: ``gguf_missing``.
    """
    path = folder / f"grid-{model.name}-v{_VERSION}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _write(load_gguf(), model, part)
        part.rename(path)
    return path


def _write(gguf: Any, model: GridModel, path: Path) -> None:
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_context_length(131_072)
    writer.add_embedding_length(model.n_embd)
    writer.add_block_count(model.n_layer)
    writer.add_vocab_size(model.n_vocab)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_feed_forward_length(model.n_ff)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(1)

    def matrix(name: str, columns: int, rows: int) -> None:
        kind = getattr(gguf.GGMLQuantizationType, model.kind.upper())
        data = _matrix(rng, model.kind, rows, columns)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def vector(name: str, n: int, mean: float = 1.0) -> None:
        writer.add_tensor(name, rng.normal(mean, 0.1, n).astype(np.float32))

    matrix("token_embd", model.n_embd, model.n_vocab)
    vector("output_norm.weight", model.n_embd)
    if not model.tied:
        matrix("output", model.n_embd, model.n_vocab)
    if model.arch == "mamba":
        _mamba(writer, model, rng)
    else:
        _attention_metadata(writer, model)
        for layer in range(model.n_layer):
            _layer(model, f"blk.{layer}", matrix, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _attention_metadata(writer: Any, model: GridModel) -> None:
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    writer.add_key_length(model.head)
    writer.add_value_length(model.head)
    writer.add_rope_dimension_count(model.head)
    writer.add_rope_freq_base(10_000.0)
    if model.window:
        writer.add_sliding_window(model.window)


def _layer(
    model: GridModel, at: str, matrix: Callable[..., None], vector: Callable[..., None]
) -> None:
    embd, q, kv = model.n_embd, model.n_head * model.head, model.n_head_kv * model.head
    vector(f"{at}.attn_norm.weight", embd)
    matrix(f"{at}.attn_q", embd, q)
    matrix(f"{at}.attn_k", embd, kv)
    matrix(f"{at}.attn_v", embd, kv)
    matrix(f"{at}.attn_output", q, embd)
    vector(f"{at}.ffn_norm.weight", embd)
    matrix(f"{at}.ffn_gate", embd, model.n_ff)
    matrix(f"{at}.ffn_up", embd, model.n_ff)
    matrix(f"{at}.ffn_down", model.n_ff, embd)
    if model.arch == "qwen2":
        for name, n in (("q", q), ("k", kv), ("v", kv)):
            vector(f"{at}.attn_{name}.bias", n, 0.0)
    if model.arch == "gemma3":
        for name in ("attn_q_norm", "attn_k_norm"):
            vector(f"{at}.{name}.weight", model.head)
        for name in ("post_attention_norm", "post_ffw_norm"):
            vector(f"{at}.{name}.weight", embd)


def _mamba(writer: Any, model: GridModel, rng: np.random.Generator) -> None:
    inner, state, rank, width = 2 * model.n_embd, 16, 4, 4
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_head_count(0)
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "attn_norm.weight": ((model.n_embd,), 1.0),
        "ssm_in.weight": ((2 * inner, model.n_embd), 0.0),
        "ssm_conv1d.weight": ((inner, width), 0.0),
        "ssm_conv1d.bias": ((inner,), 0.0),
        "ssm_x.weight": ((rank + 2 * state, inner), 0.0),
        "ssm_dt.weight": ((inner, rank), 0.0),
        "ssm_dt.bias": ((inner,), -1.0),
        "ssm_a": ((inner, state), -1.0),
        "ssm_d": ((inner,), 1.0),
        "ssm_out.weight": ((model.n_embd, inner), 0.0),
    }
    for layer in range(model.n_layer):
        for name, (shape, mean) in shapes.items():
            data = rng.normal(mean, 1 / math.sqrt(shape[-1]) / 4, shape).astype(np.float32)
            # A must be negative, or the state explodes.
            data = -np.abs(data) if name == "ssm_a" else data
            writer.add_tensor(f"blk.{layer}.{name}", data)


def _matrix(rng: np.random.Generator, kind: str, rows: int, columns: int) -> NDArray[Any]:
    """Rows of random blocks whose values spread by about 1 / sqrt(columns)."""
    spread = 1 / math.sqrt(columns)
    values, size = _BLOCKS[kind]
    if values == 1:
        plain = np.float16 if kind == "f16" else np.float32
        return np.resize(rng.normal(0, spread, 1 << 16).astype(plain), (rows, columns))
    blocks = rng.integers(0, 256, (4096, size), dtype=np.uint8)
    if kind == "q4_K":
        # value = d × scale (6 bits) × q (4 bits) - dmin × offset (6 bits)
        blocks[:, :2] = _half(spread / 150)
        blocks[:, 2:4] = _half(spread / 20)
    else:
        blocks[:, :2] = _half(spread / (_STD_Q4 if kind == "q4_0" else _STD_Q8))
    count = rows * columns // values
    return np.resize(blocks, (count, size)).reshape(rows, columns // values * size)


def _half(value: float) -> NDArray[np.uint8]:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)
