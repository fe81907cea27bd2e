"""What a live context takes beyond its buffers: the formulas against what NVML showed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.llama.scratch import (
    BF16,
    F16,
    F32,
    SLACK_BYTES,
    Dimensions,
    Gpu,
    scratch_bytes,
)
from vram_conductor.worker.llama.sizes import GRANULE_BYTES

MIB = 1 << 20
Q4_0, Q8_0, Q4_K, IQ1_M = 2, 8, 12, 29
H200 = Gpu(sm_count=132, compute=90, cublas_bytes=98 * MIB)
OLD = Gpu(sm_count=28, compute=61, cublas_bytes=12 * MIB)


@dataclass(frozen=True)
class Matrix:
    name: str
    shape: tuple[int, ...]
    kind: int


def llama(n_embd: int, n_q: int, n_kv: int, n_ff: int, kind: int) -> list[Matrix]:
    """The matrices of one layer and a tied output."""
    return [
        Matrix("token_embd.weight", (n_embd, 49_152), kind),
        Matrix("blk.0.attn_q.weight", (n_embd, n_q), kind),
        Matrix("blk.0.attn_k.weight", (n_embd, n_kv), kind),
        Matrix("blk.0.attn_output.weight", (n_q, n_embd), kind),
        Matrix("blk.0.ffn_up.weight", (n_embd, n_ff), kind),
        Matrix("blk.0.ffn_down.weight", (n_ff, n_embd), kind),
        Matrix("blk.0.ffn_norm.weight", (n_embd,), F32),
    ]


@pytest.mark.parametrize(
    ("matrices", "head", "seen_mib"),
    [
        (llama(960, 960, 320, 2560, Q4_0), 64, 10),
        (llama(896, 896, 128, 4864, Q8_0), 64, 12),
        (llama(2048, 2048, 512, 8192, Q4_K), 64, 14),
        (llama(2048, 2048, 512, 5632, Q4_0), 128, 12),
        (llama(1152, 1024, 256, 6912, Q8_0), 256, 18),
        (llama(1024, 1024, 512, 2816, F16), 64, 104),
    ],
    ids=["360m", "0.5b", "1b", "head128", "gemma", "f16"],
)
@pytest.mark.parametrize("outputs", [1, 4, 8])
def test_what_an_h200_showed(
    matrices: list[Matrix], head: int, seen_mib: int, outputs: int
) -> None:
    """Seen with llama-cpp-python 0.3.36, the same at 2k to 128k cells, f16 and q8_0, whether the
    context was empty or full."""
    size = Dimensions(tokens=512, outputs=outputs, n_head=16, head_v=head)
    assert 0 <= scratch_bytes(matrices, size, H200) - seen_mib * MIB <= SLACK_BYTES


def test_one_plain_matrix_brings_cublas() -> None:
    quantised = llama(2048, 2048, 512, 8192, Q4_K)
    size = Dimensions(tokens=512, n_head=32, head_v=64)
    without = scratch_bytes(quantised, size, H200)
    for matrix in (
        Matrix("blk.0.ffn_gate_inp.weight", (2048, 64), F32),
        Matrix("per_layer_model_proj.weight", (2048, 256), BF16),
        Matrix("blk.0.ffn_up.weight", (2048, 1024), IQ1_M),
    ):
        assert scratch_bytes([*quantised, matrix], size, H200) >= without + H200.cublas_bytes
    for matrix in (
        Matrix("blk.0.ssm_conv1d.weight", (4, 2048), F32),
        Matrix("blk.0.attn_norm.weight", (2048, 1), F32),
        Matrix("per_layer_token_embd.weight", (8192, 262_144), F16),
        Matrix("rope_freqs.weight", (64,), F32),
    ):
        assert scratch_bytes([*quantised, matrix], size, H200) == without


def test_an_output_is_computed_for_few_rows() -> None:
    """With a whole micro-batch of rows a vocabulary of 128,000 would take 130 MB more."""
    output = Matrix("output.weight", (4096, 128_256), F16)
    few = scratch_bytes([output], Dimensions(tokens=512, outputs=8), H200)
    many = scratch_bytes([output], Dimensions(tokens=512, outputs=32), H200)
    assert few <= 4 * MIB
    assert H200.cublas_bytes + 8 * MIB < many < H200.cublas_bytes + 16 * MIB


def test_experts_multiply_the_rows() -> None:
    stack = Matrix("blk.0.ffn_down_exps.weight", (4096, 2048, 64), Q4_K)
    one = scratch_bytes([stack], Dimensions(tokens=512), H200)
    eight = scratch_bytes([stack], Dimensions(tokens=512, experts_used=8), H200)
    assert eight - one > 7 * 512 * 4096 * 9 // 8 - GRANULE_BYTES


def test_scores_that_no_kernel_keeps_to_itself_lie_in_the_pool() -> None:
    size = Dimensions(tokens=512, n_head=16, head_v=48, n_embd_kv=768, cells=8192, flash=False)
    assert scratch_bytes([], size, H200) > H200.cublas_bytes + 8192 * 512 * 16 * 2


shapes = st.tuples(st.integers(1, 16_384), st.integers(1, 16_384))
kinds = st.sampled_from([F32, F16, BF16, Q4_0, Q8_0, Q4_K, IQ1_M])


@given(
    st.lists(st.tuples(shapes, kinds), max_size=6),
    st.integers(1, 1024),
    st.integers(1, 64),
    st.sampled_from([H200, OLD]),
)
def test_a_larger_batch_or_model_never_takes_less(
    found: list[tuple[tuple[int, int], int]], tokens: int, outputs: int, gpu: Gpu
) -> None:
    matrices = [Matrix(f"blk.{i}.w.weight", *item) for i, item in enumerate(found)]
    size = Dimensions(tokens=tokens, outputs=outputs, n_head=8, head_v=64)
    taken = scratch_bytes(matrices, size, gpu)
    assert taken >= SLACK_BYTES
    larger = Dimensions(tokens=tokens + 1, outputs=outputs, n_head=8, head_v=64)
    assert scratch_bytes(matrices, larger, gpu) >= taken
    assert scratch_bytes(matrices[1:], size, gpu) <= taken
