"""The tensor list, and the part of it that lies on a GPU."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf_models import Spec, make_model

from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.loglines import ROUNDING_BYTES
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.repacking import second_copy_bytes
from vram_conductor.worker.llama.samples import Sample, write_sample
from vram_conductor.worker.llama.tensors import Tensor, cuda_weights_bytes, read_tensors

F32, Q8_0 = 0, 8


def reference(path: Path) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [
        (t.name, tuple(int(n) for n in t.shape), int(t.tensor_type), int(t.n_bytes))
        for t in gguf.GGUFReader(path).tensors
    ]


@pytest.mark.parametrize(
    "spec",
    [Spec(arch="llama", vocab="bytes", chat_template="{}"), Spec(arch="jamba"), Spec(arch="mamba")],
    ids=lambda spec: str(spec.arch),
)
def test_the_list_is_that_of_the_reference_reader(spec: Spec) -> None:
    path = make_model(spec)
    tensors = [(t.name, t.shape, t.kind, t.bytes) for t in read_tensors(str(path))]
    assert tensors == reference(path)


@pytest.mark.real
def test_quantised_tensors_of_a_real_model(smollm2: Path) -> None:
    tensors = read_tensors(str(smollm2))
    assert [(t.name, t.shape, t.kind, t.bytes) for t in tensors] == reference(smollm2)
    # Tied: everything lies on the GPU, the embedding as the output.
    assert 0 <= cuda_weights_bytes(tensors) - sum(t.bytes for t in tensors) < 1 << 20


def test_an_untied_embedding_stays_on_the_host() -> None:
    layer, embedding = Tensor("blk.0.ffn_up.weight", (64, 96), F32), "token_embd.weight"
    tied = [Tensor(embedding, (64, 320), F32), layer]
    untied = [*tied, Tensor("output.weight", (64, 320), F32)]
    both = (64 * 320 + 64 * 96) * 4
    assert cuda_weights_bytes(tied) == both
    assert cuda_weights_bytes(untied) == both
    assert cuda_weights_bytes([*tied, Tensor("per_layer_token_embd.weight", (64, 9), F32)]) == both


def test_ragged_quantised_rows_are_padded() -> None:
    # 576 = 512 + 64: the last row grows by 448 elements, 14 blocks of 34 bytes.
    tensor = Tensor("w", (576, 10), Q8_0)
    assert tensor.bytes == 18 * 34 * 10
    assert tensor.cuda_bytes == -(-(18 * 34 * 10 + 14 * 34) // 128) * 128
    assert Tensor("w", (512, 10), Q8_0).cuda_bytes == -(-(16 * 34 * 10) // 128) * 128
    assert Tensor("w", (576, 10), F32).cuda_bytes == 576 * 10 * 4


@pytest.mark.parametrize("kind", [2, 8, 12, 14], ids=["q4_0", "q8_0", "q4_K", "q6_K"])
def test_a_tied_output_that_is_rewritten_counts_twice(tmp_path: Path, kind: int) -> None:
    """The cpu backend keeps the plain embeddings beside the rewritten output layer."""
    path = tmp_path / "tied.gguf"
    write_sample(path, Sample(kind=kind))
    options = EngineOptions(threads=1)
    runner = DryRunner(options)
    estimated = runner.estimate(str(path), "m", PoolShape(256, 1), 256, None).weights_bytes
    runner.close()
    model = LlamaModel(str(path), "m", options)
    measured = model.measured_bytes
    model.close()
    assert 0 <= estimated - measured <= 4 * ROUNDING_BYTES
    embedding = next(t for t in read_tensors(str(path)) if t.name == "token_embd.weight")
    assert second_copy_bytes([embedding]) in (0, embedding.bytes)
    untied = [embedding, Tensor("output.weight", embedding.shape, kind)]
    assert second_copy_bytes(untied) == 0
