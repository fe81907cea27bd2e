"""What a model's forward pass depends on, read from its metadata. *Pure.*

Keys and defaults: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
llama-model.cpp. A key that would change the result and is not handled here is an error: ignoring
it would give wrong logits without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.metadata import Metadata
from vram_conductor.worker.pipeline.rope import (
    SCALINGS,
    YARN_BETA_FAST,
    YARN_BETA_SLOW,
    Rope,
    RopeScaling,
    Scaling,
    rope_of,
)
from vram_conductor.worker.pipeline.tensor_types import Tensor

HEAD_DIM_MULTIPLE = 32
HEAD_DIM_MAX = 256
"""What the attention kernel is made for."""

_POSITIONS_MOST = (1 << 31) - 1
"""They are 32-bit integers: a window beyond it sees everything."""

_GEMMA3_PERIOD = 6
"""Of Gemma 3's layers, every sixth sees everything; the others see a window."""

_GEMMA3_LOCAL_BASE = 10_000.0
_GEMMA3_27B_LAYERS = 62

_UNHANDLED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_parallel_residual",
    "attention.alibi_bias_max",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.temperature_scale",
    "attention.temperature_length",
    "attention.shared_kv_layers",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.group_norm_groups",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "pooling_type",
    "rope.dimension_count_swa",
    "rope.dimension_sections",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "altup.num_inputs",
    "embedding_length_per_layer_input",
    "nextn_predict_layers",
)
"""Keys behind ``{arch}.`` that change the result where they are neither absent nor 0."""


@dataclass(frozen=True)
class Hyperparameters:
    """Dimensions and variants of one model.

    Attributes:
        n_head_kv: heads of keys and values; a divisor of n_head.
        head_dim: values of a head, of queries, keys and values alike.
        rope_pairs: which values of a head turn together: neighbours (0, 1), (2, 3) … or those of
            both halves, (0, n_rot / 2), (1, n_rot / 2 + 1) …
        attention_scale: of the products of queries and keys.
        embedding_scale: of the embeddings, before the first layer.
        activation: of the gate; ``gelu`` is the tanh approximation.
        sliding_window: a windowed layer sees so many positions, its own among them; 0: none.
        window_period: layer i sees everything where i % period == period - 1.
        qk_norm: queries and keys are normalised per head, before they are turned.
        post_norms: attention and feed-forward results are normalised before they are added.
        tied: the output matrix is the token embedding.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope_pairs: Literal["adjacent", "halves"]
    attention_scale: float
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu"] = "silu"
    sliding_window: int = 0
    window_period: int = 1
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    tied: bool = False
    ropes: tuple[Rope, Rope] = field(repr=False, compare=False, kw_only=True)

    @property
    def q_width(self) -> int:
        """Width of the queries, and of the attention's result."""
        return self.n_head * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.n_head_kv * self.head_dim

    def is_windowed(self, layer: int) -> bool:
        """Whether the layer sees the sliding window only."""
        return self.sliding_window > 0 and layer % self.window_period < self.window_period - 1

    def window(self, layer: int) -> int:
        """Positions that the layer sees; 0: all."""
        return self.sliding_window if self.is_windowed(layer) else 0

    def rope(self, layer: int) -> Rope:
        """The rotation of that layer."""
        return self.ropes[self.is_windowed(layer)]


def read_hyperparameters(
    metadata: Metadata,
    tensors: Mapping[str, Tensor],
    divisors: NDArray[np.float32] | None,
) -> Hyperparameters:
    """Read and check them.

    Args:
        divisors: the values of ``rope_freqs.weight``, if there is one.

    Raises:
        InvalidArgument: ``bad_model``: a key is missing or has an impossible value.
        Unimplemented: ``unsupported_feature``.
    """
    arch = metadata.arch
    gemma = arch == "gemma3"
    _check_handled(metadata)
    n_embd = metadata.positive("embedding_length")
    n_head = metadata.positive("attention.head_count")
    n_head_kv = metadata.positive("attention.head_count_kv", n_head)
    head_dim = metadata.positive("attention.key_length", n_embd // n_head)
    _check_heads(metadata, n_head, n_head_kv, head_dim)
    n_layer = metadata.positive("block_count")
    wide = gemma and n_layer == _GEMMA3_27B_LAYERS
    return Hyperparameters(
        arch=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=metadata.positive("feed_forward_length"),
        n_vocab=tensors["token_embd.weight"].rows if "token_embd.weight" in tensors else 0,
        n_ctx_train=metadata.positive("context_length"),
        norm_eps=metadata.real("attention.layer_norm_rms_epsilon"),
        rope_pairs="adjacent" if arch == "llama" else "halves",
        # Gemma 3's 27B scales by the embedding's width per head, which is not its head_dim.
        attention_scale=1 / math.sqrt(n_embd / n_head if wide else head_dim),
        embedding_scale=math.sqrt(n_embd) if gemma else 1.0,
        activation="gelu" if gemma else "silu",
        sliding_window=min(metadata.natural("attention.sliding_window", 0), _POSITIONS_MOST),
        window_period=metadata.positive("attention.sliding_window_pattern", _GEMMA3_PERIOD),
        qk_norm=gemma,
        post_norms=gemma,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        tied="output.weight" not in tensors,
        ropes=_ropes(metadata, head_dim, divisors),
    )


def _check_handled(metadata: Metadata) -> None:
    for key in _UNHANDLED:
        metadata.refuse(key)
    if metadata.scalar("attention.causal", True) is False:
        raise metadata.unsupported("attention.causal", "attention that sees what comes later")
    if metadata.arch != "gemma3" and metadata.natural("attention.sliding_window", 0):
        raise metadata.unsupported(
            "attention.sliding_window", "a sliding window in this architecture"
        )


def _check_heads(metadata: Metadata, n_head: int, n_head_kv: int, head_dim: int) -> None:
    value_length = metadata.positive("attention.value_length", head_dim)
    if value_length != head_dim:
        raise metadata.unsupported(
            "attention.value_length", f"values of {value_length} beside keys of {head_dim}"
        )
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > HEAD_DIM_MAX:
        raise metadata.unsupported(
            "attention.key_length",
            f"heads of {head_dim} values (known: {HEAD_DIM_MULTIPLE} to {HEAD_DIM_MAX} in steps of "
            f"{HEAD_DIM_MULTIPLE})",
        )
    if n_head % n_head_kv:
        raise metadata.bad(
            "attention.head_count_kv", f"{n_head_kv}, which does not divide {n_head} heads"
        )


def _ropes(
    metadata: Metadata, head_dim: int, divisors: NDArray[np.float32] | None
) -> tuple[Rope, Rope]:
    """Of layers that see everything, and of windowed ones."""
    n_rot = metadata.positive("rope.dimension_count", head_dim)
    if n_rot % 2 or n_rot > head_dim or (metadata.arch != "gemma3" and n_rot != head_dim):
        raise metadata.bad("rope.dimension_count", f"{n_rot} with heads of {head_dim} values")
    if divisors is not None and len(divisors) != n_rot // 2:
        raise metadata.bad("rope.dimension_count", f"{n_rot} with {len(divisors)} rope_freqs")
    if divisors is not None and not (divisors > 0).all():
        raise metadata.bad("rope.dimension_count", f"{n_rot} with rope_freqs not all above 0")
    scaling = _scaling(metadata)
    if metadata.arch == "gemma3" and scaling.kind == "yarn":
        raise metadata.unsupported("rope.scaling.type", "yarn in this architecture")
    base = metadata.real("rope.freq_base", 10_000.0)
    local = metadata.real("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    if min(base, local) <= 1:
        raise metadata.bad("rope.freq_base", f"{min(base, local)}, not above 1")
    unscaled = RopeScaling(attention_factor=scaling.attention_factor)
    ropes = rope_of(n_rot, base, scaling, divisors), rope_of(n_rot, local, unscaled)
    if not all(np.isfinite(turn.inverse_frequencies).all() for turn in ropes):
        raise metadata.bad(
            "rope.scaling.factor", f"{scaling.factor:g}, too near to 0 (or so are rope_freqs)"
        )
    return ropes


def _scaling(metadata: Metadata) -> RopeScaling:
    # llama.cpp reads these two for other architectures only: to follow neither it nor the file
    # would be silent.
    for key, value in (("beta_fast", YARN_BETA_FAST), ("beta_slow", YARN_BETA_SLOW)):
        if metadata.real(f"rope.scaling.yarn_{key}", value) != value:
            raise metadata.unsupported(f"rope.scaling.yarn_{key}", f"another value than {value}")
    name = metadata.scalar("rope.scaling.type", "linear")
    kind: Scaling | None = next((kind for kind in SCALINGS if kind == name), None)
    if kind is None:
        raise metadata.unsupported("rope.scaling.type", f"{name!r} (known: {', '.join(SCALINGS)})")
    factor = metadata.real("rope.scaling.factor", 0.0) or metadata.real("rope.scale_linear", 0.0)
    return RopeScaling(
        kind=kind,
        # 0 means absent.
        factor=factor or 1.0,
        original_context=metadata.positive(
            "rope.scaling.original_context_length", metadata.positive("context_length")
        ),
        attention_factor=metadata.real("rope.scaling.attn_factor", 1.0),
    )
