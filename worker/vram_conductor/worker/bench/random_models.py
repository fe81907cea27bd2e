"""GGUFs with random weights: as large and as fast as real ones, with nothing to say.

A Q4_0 row is random bytes with a small scale, so a billion parameters take a second. The
vocabulary is a byte-level BPE one in which every token is text. Greedy decoding never ends one's
reply: the end token's row is zero, and so is its logit.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import FailedPrecondition, ResourceExhausted
from vram_conductor.worker.bench.random_shapes import (
    BLOCK_BYTES,
    BLOCK_VALUES,
    Shape,
    find_shape,
)

END_TOKEN = 256
"""Id of the only control token, behind the 256 bytes."""

_VERSION, _BALANCED_VERSION = 1, 2
_VALUE_STD = math.sqrt((16**2 - 1) / 12)
"""Of a random 4-bit value."""

_GAIN = {"token_embd": 6.0, "attn": 3.0, "ffn": 2.0, "output": 6.0}
"""By the first of these in a tensor's name; large enough that tokens depend on what came before."""

_BALANCED_GAIN = {
    "token_embd": 0.0,
    "attn_q": 1.3,
    "attn_k": 1.3,
    "attn": 0.7,
    "ffn": 0.7,
    "output": 4.0,
}
"""Of a balanced model: by the first of these, too. The values of an
embedding have a standard deviation of 1 (0 here) and a layer adds about as much, so that none is in
vain and none drowns the others; queries and keys are so large that some tokens are looked at more
than others."""


def load_gguf() -> Any:
    """The ``gguf`` package.

    Raises:
        FailedPrecondition: ``gguf_missing``.
    """
    try:
        import gguf
    except ImportError:
        raise FailedPrecondition(
            "gguf_missing",
            "random models are written with the gguf package: pip install gguf, "
            "or name real files with --models",
        ) from None
    return gguf


def make_random(name: str, folder: Path) -> Path:
    """Write the model of that size, once; returns its path.

    Raises:
        InvalidArgument: ``unknown_size``.
        FailedPrecondition: ``gguf_missing``.
        ResourceExhausted: ``disk_short``.
    """
    shape = find_shape(name)
    version = _BALANCED_VERSION if shape.balanced else _VERSION
    path = folder / f"random-{name}-v{version}.gguf"
    if not path.exists():
        gguf = load_gguf()
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(shape, folder)
        part = path.with_suffix(f".part{os.getpid()}")
        try:
            _write(gguf, shape, part)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _check_room(shape: Shape, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if shape.n_bytes > free_bytes:
        raise ResourceExhausted(
            "disk_short",
            f"a random model of {shape.name} takes {shape.n_bytes} bytes, and {free_bytes} are "
            f"free in {folder}: make room, or name another temporary folder with TMPDIR",
            need_bytes=shape.n_bytes,
            free_bytes=free_bytes,
        )


def is_random(path: str | Path) -> bool:
    """Whether :func:`make_random` gave it its name."""
    return re.fullmatch(r"random-.+-v\d+\.gguf", Path(path).name) is not None


def _write(gguf: Any, shape: Shape, path: Path) -> None:
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _vocabulary(writer, shape.n_vocab)
    q4 = gguf.GGMLQuantizationType.Q4_0
    for tensor, n, _ in shape.vectors():
        writer.add_tensor_info(tensor, (n,), np.dtype(np.float32), 4 * n)
    for tensor, rows, columns in shape.matrices():
        row_bytes = columns // BLOCK_VALUES * BLOCK_BYTES
        # The package turns a shape in bytes into one in values.
        writer.add_tensor_info(
            tensor, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, raw_dtype=q4
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(shape.seed)
    for _, n, mean in shape.vectors():
        writer.write_tensor_data(rng.normal(mean, 0.1, n).astype(np.float32))
    for tensor, rows, columns in shape.matrices():
        data = _matrix(rng, tensor, rows, columns, _gain(shape, tensor, columns))
        writer.write_tensor_data(_balanced(rng, data) if shape.balanced else data)
    writer.close()


def _gain(shape: Shape, tensor: str, columns: int) -> float:
    """Standard deviation of what comes out where that of what goes in is 1."""
    gains = _BALANCED_GAIN if shape.balanced else _GAIN
    gain = next(gain for part, gain in gains.items() if part in tensor)
    # No product of a row with anything, but the row itself comes out of the embeddings.
    return gain or math.sqrt(columns)


def _matrix(
    rng: np.random.Generator, tensor: str, rows: int, columns: int, gain: float
) -> NDArray[np.uint8]:
    """Q4_0 blocks (rows × columns / 32, 18 bytes): value = scale × (4-bit number − 8)."""
    blocks = columns // BLOCK_VALUES
    data = np.frombuffer(bytearray(rng.bytes(rows * blocks * BLOCK_BYTES)), np.uint8)
    data = data.reshape(rows, blocks, BLOCK_BYTES)
    scale = np.float16(gain / (_VALUE_STD * math.sqrt(columns)))
    data[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    if tensor.startswith(("token_embd", "output")):
        data[END_TOKEN, :, :2] = 0
    return data


def _balanced(rng: np.random.Generator, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The blocks, half of them with a scale below zero: 4-bit numbers have the mean −½."""
    rows, blocks, _ = data.shape
    bits = np.frombuffer(rng.bytes(-(-rows * blocks // 8)), np.uint8)
    signs = np.unpackbits(bits, count=rows * blocks).reshape(rows, blocks)
    data[:, :, 1] ^= signs << 7
    return data


def _vocabulary(writer: Any, n_vocab: int) -> None:
    # GPT-2's way to write any byte as a printable character.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in shown] + [chr(256 + at) for at in range(256 - len(shown))]
    tokens.append("<|end|>")
    types = [1] * 256 + [3]
    tokens += [f"Ġw{at}" for at in range(len(tokens), n_vocab)]
    types += [1] * (n_vocab - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a a", "aa aa"])
    writer.add_bos_token_id(END_TOKEN)
    writer.add_eos_token_id(END_TOKEN)
    writer.add_add_bos_token(False)
