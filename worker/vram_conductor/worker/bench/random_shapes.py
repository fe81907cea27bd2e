"""Dimensions of the random-weight models, by name. *Pure.*

Those of 0.36B, 0.5B, 1.2B and 8B parameters have the dimensions of well-known models of that size,
so that copies, buffers and kernels are as large as there; the tiny ones are for machines without a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vram_conductor.protocol.errors import InvalidArgument

BLOCK_VALUES = 32
BLOCK_BYTES = 18
"""Q4_0 of ggml: one f16 scale and 32 values of 4 bits."""


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        name: what users write.
        n_ff: width of the feed-forward layers; like n_embd a multiple of 32.
        seed: of the weights.
        head_dim: values of a head; n_embd is a multiple of it.
        tied: the embeddings are the output layer, too.
        balanced: weights are as often above as below zero, and every layer changes what comes out;
            without, a Q4_0 block's mean is below zero, and one direction drowns all others. The
            older sizes stay as they are: their figures of then and now are about the same files.
    """

    name: str
    arch: Literal["llama", "qwen2"]
    n_layer: int
    n_embd: int
    n_ff: int
    n_head_kv: int
    n_vocab: int
    seed: int = 1
    n_ctx_train: int = 131_072
    head_dim: int = 64
    tied: bool = True
    balanced: bool = False

    @property
    def n_head(self) -> int:
        return self.n_embd // self.head_dim

    @property
    def n_kv(self) -> int:
        """Width of K and of V."""
        return self.n_head_kv * self.head_dim

    @property
    def bias(self) -> bool:
        """Whether Q, K and V have biases."""
        return self.arch == "qwen2"

    @property
    def parameters(self) -> int:
        """Values in its matrices."""
        return sum(rows * columns for _, rows, columns in self.matrices())

    @property
    def n_bytes(self) -> int:
        """Of its tensors in a file."""
        vectors = sum(length for _, length, _ in self.vectors())
        return self.parameters // BLOCK_VALUES * BLOCK_BYTES + 4 * vectors

    def matrices(self) -> list[tuple[str, int, int]]:
        """(tensor, rows, columns) of every Q4_0 matrix; columns are what a layer reads."""
        embd, found = self.n_embd, [("token_embd.weight", self.n_vocab, self.n_embd)]
        for layer in range(self.n_layer):
            at = f"blk.{layer}"
            found += [
                (f"{at}.attn_q.weight", embd, embd),
                (f"{at}.attn_k.weight", self.n_kv, embd),
                (f"{at}.attn_v.weight", self.n_kv, embd),
                (f"{at}.attn_output.weight", embd, embd),
                (f"{at}.ffn_gate.weight", self.n_ff, embd),
                (f"{at}.ffn_up.weight", self.n_ff, embd),
                (f"{at}.ffn_down.weight", embd, self.n_ff),
            ]
        if not self.tied:
            found.append(("output.weight", self.n_vocab, embd))
        return found

    def vectors(self) -> list[tuple[str, int, float]]:
        """(tensor, length, mean) of every f32 vector: norms around 1, biases around 0."""
        found = [("output_norm.weight", self.n_embd, 1.0)]
        for layer in range(self.n_layer):
            at = f"blk.{layer}"
            found += [(f"{at}.attn_norm.weight", self.n_embd, 1.0)]
            found += [(f"{at}.ffn_norm.weight", self.n_embd, 1.0)]
            if self.bias:
                found += [(f"{at}.attn_q.bias", self.n_embd, 0.0)]
                found += [(f"{at}.attn_{part}.bias", self.n_kv, 0.0) for part in "kv"]
        return found


_TINY = Shape("tiny-1", "llama", 4, 128, 256, 1, 2_048)

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _TINY,
        replace(_TINY, name="tiny-2", arch="qwen2", n_layer=5, seed=2),
        replace(_TINY, name="tiny-3", n_layer=6, n_ff=384, seed=3),
        Shape("0.36B", "llama", 32, 960, 2_560, 5, 49_152),
        Shape("0.5B", "qwen2", 24, 896, 4_864, 2, 151_936, seed=2),
        Shape("1.2B", "llama", 16, 2_048, 8_192, 8, 128_256, seed=3),
        Shape("7B", "llama", 32, 4_096, 14_336, 8, 32_000, seed=4),
        Shape(
            "8B",
            "llama",
            32,
            4_096,
            14_336,
            8,
            128_256,
            seed=5,
            head_dim=128,
            tied=False,
            balanced=True,
        ),
    )
}


def find_shape(name: str) -> Shape:
    """The shape of that name.

    Raises:
        InvalidArgument: ``unknown_size``.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise InvalidArgument(
            "unknown_size",
            f"no random model has the size {name!r}; there are: {', '.join(SHAPES)}",
            sizes=list(SHAPES),
        )
    return shape
