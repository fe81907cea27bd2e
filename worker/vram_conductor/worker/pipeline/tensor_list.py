"""Which tensors a model must consist of, and no others. *Pure.*

A tensor that nobody reads would change the result where another engine reads it (a bias, an
expert, an adapter), so it is an error like a missing one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vram_conductor.protocol.errors import InvalidArgument, Unimplemented
from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters
from vram_conductor.worker.pipeline.tensor_types import Tensor, TensorType

COLUMNS_MULTIPLE = 32
"""Values of a matrix row that a kernel takes at once; quantised rows are made of blocks of it."""

ROPE_FREQS = "rope_freqs.weight"

Shape = tuple[int, int]
"""Rows and columns; a vector has one row."""


def layer_tensors(it: Hyperparameters) -> dict[str, tuple[str, Shape]]:
    """Name inside a unit → name in the file behind ``blk.N.``, and shape; in a fixed order."""
    embd, q, kv, ff = it.n_embd, it.q_width, it.kv_width, it.n_ff
    shapes: dict[str, Shape] = {
        "attn_norm.weight": (1, embd),
        "attn_q.weight": (q, embd),
        "attn_k.weight": (kv, embd),
        "attn_v.weight": (kv, embd),
    }
    if it.qkv_bias:
        shapes |= {"attn_q.bias": (1, q), "attn_k.bias": (1, kv), "attn_v.bias": (1, kv)}
    if it.qk_norm:
        shapes |= {"attn_q_norm.weight": (1, it.head_dim), "attn_k_norm.weight": (1, it.head_dim)}
    shapes["attn_output.weight"] = (embd, q)
    if it.post_norms:
        shapes["post_attention_norm.weight"] = (1, embd)
    shapes |= {
        "ffn_norm.weight": (1, embd),
        "ffn_gate.weight": (ff, embd),
        "ffn_up.weight": (ff, embd),
        "ffn_down.weight": (embd, ff),
    }
    if it.post_norms:
        shapes["post_ffw_norm.weight"] = (1, embd)
    return {
        name.removesuffix(".weight").replace(".", "_"): (name, shape)
        for name, shape in shapes.items()
    }


def expected_tensors(it: Hyperparameters) -> Iterator[tuple[str, Shape]]:
    """Name in the file and shape, of everything but ``rope_freqs.weight``."""
    yield "token_embd.weight", (it.n_vocab, it.n_embd)
    yield "output_norm.weight", (1, it.n_embd)
    if not it.tied:
        yield "output.weight", (it.n_vocab, it.n_embd)
    for layer in range(it.n_layer):
        for name, shape in layer_tensors(it).values():
            yield f"blk.{layer}.{name}", shape


def check_tensors(path: str, it: Hyperparameters, tensors: Mapping[str, Tensor]) -> None:
    """Compare a file with what its metadata says.

    Raises:
        InvalidArgument: ``bad_model``: a tensor is missing or has another shape.
        Unimplemented: ``unsupported_tensor``: one that is not known, a vector that is not F32, a
            matrix with rows of odd length.
    """
    known = {ROPE_FREQS} if it.arch == "llama" else set[str]()
    # One by one, up to the first that is missing: a damaged file may claim a billion layers.
    for name, (rows, columns) in expected_tensors(it):
        known.add(name)
        tensor = tensors.get(name)
        if tensor is None:
            raise InvalidArgument(
                "bad_model",
                f"{path}: the {it.arch} model has no tensor {name} ({rows} × {columns}), which "
                "the layer pipeline needs: get the file again, or take one that llama.cpp's "
                "converter wrote",
                path=path,
                tensor=name,
            )
        if (tensor.rows, tensor.columns) != (rows, columns):
            raise InvalidArgument(
                "bad_model",
                f"{path}: tensor {name} has {tensor.rows} rows of {tensor.columns}; the metadata "
                f"says {rows} of {columns}: get the file again",
                path=path,
                tensor=name,
            )
    for name, tensor in tensors.items():
        if name not in known:
            raise _unsupported(
                path,
                tensor,
                f"is known in no {it.arch} model; leaving it out would give wrong results",
            )
        if tensor.rows == 1 and tensor.type != TensorType.F32:
            raise _unsupported(path, tensor, "is a vector, and the kernels read those as F32")
        if tensor.rows > 1 and tensor.columns % COLUMNS_MULTIPLE:
            what = f"has rows that are no multiple of {COLUMNS_MULTIPLE}, as the kernels need"
            raise _unsupported(path, tensor, what)


def _unsupported(path: str, tensor: Tensor, what: str) -> Unimplemented:
    return Unimplemented(
        "unsupported_tensor",
        f"{path}: tensor {tensor.name} ({tensor.type.name}, {tensor.rows} × {tensor.columns}) "
        f"{what}: take another file of this model",
        path=path,
        tensor=tensor.name,
        type=tensor.type.name,
    )
