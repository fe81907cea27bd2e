"""Models that the layer pipeline would compute wrongly: refused, with what is in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import Arch, Spec, make_model
from gguf_variants import Tensors, write_variant

from vram_conductor.protocol.errors import (
    ConductorError,
    InvalidArgument,
    Unimplemented,
)
from vram_conductor.worker.pipeline.model_file import ModelFile

REFUSED: dict[str, tuple[Arch, dict[str, Any], type[ConductorError], str, str]] = {
    "shard": ("llama", {"split.count": 3, "split.no": 1}, InvalidArgument, "split_model", "2 of 3"),
    "adapter": (
        "llama",
        {"general.type": "adapter"},
        Unimplemented,
        "unsupported_architecture",
        "'adapter' (general.type)",
    ),
    "experts": ("llama", {"llama.expert_count": 8}, Unimplemented, "unsupported_feature", "8"),
    "capped logits": (
        "gemma3",
        {"gemma3.final_logit_softcapping": 30.0},
        Unimplemented,
        "unsupported_feature",
        "final_logit_softcapping",
    ),
    "not causal": (
        "llama",
        {"llama.attention.causal": False},
        Unimplemented,
        "unsupported_feature",
        "what comes later",
    ),
    "window": (
        "qwen2",
        {"qwen2.attention.sliding_window": 64},
        Unimplemented,
        "unsupported_feature",
        "sliding window",
    ),
    "values of another length": (
        "llama",
        {"llama.attention.value_length": 64},
        Unimplemented,
        "unsupported_feature",
        "values of 64 beside keys of 32",
    ),
    "short heads": (
        "llama",
        {"llama.attention.head_count": 4},
        Unimplemented,
        "unsupported_feature",
        "heads of 16 values",
    ),
    "layers that differ": (
        "llama",
        {"llama.attention.head_count_kv": [1, 2, 1, 2]},
        Unimplemented,
        "unsupported_feature",
        "differs from layer to layer",
    ),
    "rotations for long contexts": (
        "llama",
        {"llama.rope.scaling.type": "longrope"},
        Unimplemented,
        "unsupported_feature",
        "'longrope'",
    ),
    "another ramp of frequencies": (
        "llama",
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": 16.0},
        Unimplemented,
        "unsupported_feature",
        "another value than 32",
    ),
    "rotation of odd width": (
        "llama",
        {"llama.rope.dimension_count": 33},
        InvalidArgument,
        "bad_model",
        "33 with heads of 32",
    ),
    "no heads": (
        "llama",
        {"llama.attention.head_count": 0},
        InvalidArgument,
        "bad_model",
        "head_count is 0",
    ),
    "missing key": (
        "llama",
        {"llama.attention.layer_norm_rms_epsilon": None},
        InvalidArgument,
        "bad_model",
        "layer_norm_rms_epsilon is missing",
    ),
    "text for a number": (
        "llama",
        {"llama.block_count": "four"},
        InvalidArgument,
        "bad_model",
        "'four', not a whole number",
    ),
    "more layers than tensors": (
        "llama",
        {"llama.block_count": 5},
        InvalidArgument,
        "bad_model",
        "no tensor blk.4.attn_norm.weight",
    ),
    "wider layers than tensors": (
        "llama",
        {"llama.feed_forward_length": 128},
        InvalidArgument,
        "bad_model",
        "has 96 rows of 64; the metadata says 128 of 64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_would_give_wrong_results_is_refused(case: str, tmp_path: Path) -> None:
    arch, metadata, kind, reason, text = REFUSED[case]
    path = write_variant(make_model(Spec(arch=arch)), tmp_path / "model.gguf", metadata)
    with pytest.raises(kind) as raised:
        ModelFile.open(path)
    assert raised.value.reason == reason
    assert text in str(raised.value)
    assert str(path) in str(raised.value)


def test_another_architecture_is_named_with_those_that_are_known() -> None:
    with pytest.raises(Unimplemented, match=r"'mamba'.*llama, qwen2, gemma3") as raised:
        ModelFile.open(make_model(Spec(arch="mamba")))
    assert raised.value.reason == "unsupported_architecture"


def test_frequencies_of_one_architecture_are_not_taken_for_anothers(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.ones(16, np.float32)}
    path = write_variant(make_model(Spec(arch="qwen2")), tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(Unimplemented, match=r"rope_freqs\.weight") as raised:
        ModelFile.open(path)
    assert raised.value.reason == "unsupported_tensor"


def test_rows_of_odd_length_are_refused() -> None:
    with pytest.raises(Unimplemented, match=r"ffn_down.*64 × 100\) has rows") as raised:
        ModelFile.open(make_model(Spec(arch="llama", n_ff=100)))
    assert raised.value.reason == "unsupported_tensor"


def unknown_type() -> Tensors:
    kind = gguf.GGMLQuantizationType.Q2_K
    return {"blk.2.ffn_up.weight": (np.zeros((96, 84), np.uint8), kind)}


REFUSED_TENSORS: dict[str, tuple[Tensors, type[ConductorError], str, str]] = {
    "unknown type": (
        unknown_type(),
        Unimplemented,
        "unsupported_tensor",
        "blk.2.ffn_up.weight is Q2_K; there are kernels for F32, F16, Q4_0, Q4_1, Q5_0, Q8_0",
    ),
    "experts": (
        {"blk.1.ffn_gate_exps.weight": np.zeros((2, 96, 64), np.float32)},
        Unimplemented,
        "unsupported_tensor",
        "blk.1.ffn_gate_exps.weight has the shape [64, 96, 2]",
    ),
    "a bias that nobody adds": (
        {"blk.3.attn_output.bias": np.zeros(64, np.float32)},
        Unimplemented,
        "unsupported_tensor",
        "blk.3.attn_output.bias (F32, 1 × 64)",
    ),
    "a norm in half precision": (
        {"blk.3.attn_norm.weight": np.ones(64, np.float16)},
        Unimplemented,
        "unsupported_tensor",
        "blk.3.attn_norm.weight (F16, 1 × 64) is a vector",
    ),
    "missing": (
        {"blk.3.ffn_norm.weight": None},
        InvalidArgument,
        "bad_model",
        "no tensor blk.3.ffn_norm.weight (1 × 64)",
    ),
    "no vocabulary": (
        {"token_embd.weight": np.zeros((0, 64), np.float32)},
        InvalidArgument,
        "bad_model",
        "token_embd.weight has 0 rows of 64 values",
    ),
    "too many frequencies": (
        {"rope_freqs.weight": np.ones(64, np.float32)},
        InvalidArgument,
        "bad_model",
        "32 with 64 rope_freqs",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_tensors_that_would_give_wrong_results_are_refused(case: str, tmp_path: Path) -> None:
    tensors, kind, reason, text = REFUSED_TENSORS[case]
    path = write_variant(make_model(Spec(arch="llama")), tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(kind) as raised:
        ModelFile.open(path)
    assert raised.value.reason == reason
    assert text in str(raised.value)
