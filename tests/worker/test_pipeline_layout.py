"""Units of transfer: every byte of the layers and the head once, aligned, none too large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_models import Spec, make_model
from gguf_variants import write_variant
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters, read_hyperparameters
from vram_conductor.worker.pipeline.layout import (
    ALIGNMENT,
    CHUNK_ROWS_MULTIPLE,
    Unit,
    fill,
    units_of,
)
from vram_conductor.worker.pipeline.metadata import Metadata
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.rope import Rope
from vram_conductor.worker.pipeline.tensor_list import check_tensors, expected_tensors
from vram_conductor.worker.pipeline.tensor_types import Tensor, TensorType

Model = tuple[Hyperparameters, dict[str, Tensor]]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any dimensions and any mixture of types, as the tensor list and the metadata allow them."""
    arch = draw(st.sampled_from(["llama", "qwen2", "gemma3"]))
    heads = draw(st.integers(1, 3))
    values = {
        "general.architecture": arch,
        f"{arch}.block_count": draw(st.integers(1, 5)),
        f"{arch}.context_length": 4096,
        f"{arch}.embedding_length": 256 * draw(st.integers(1, 3)),
        f"{arch}.feed_forward_length": 256 * draw(st.integers(1, 4)),
        f"{arch}.attention.head_count": heads * draw(st.integers(1, 3)),
        f"{arch}.attention.head_count_kv": heads,
        f"{arch}.attention.key_length": 32 * draw(st.integers(1, 8)),
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    n_vocab = draw(st.integers(2, 9000))
    named = {"token_embd.weight": Tensor("token_embd.weight", TensorType.F32, n_vocab, 256)}
    if draw(st.booleans()):
        named["output.weight"] = Tensor("output.weight", TensorType.F32, n_vocab, 256)
    if arch == "qwen2":
        named["blk.0.attn_q.bias"] = Tensor("blk.0.attn_q.bias", TensorType.F32, 1, 256)
    it = read_hyperparameters(Metadata("a model", values), named, None)
    tensors: dict[str, Tensor] = {}
    for name, (rows, columns) in expected_tensors(it):
        allowed = [kind for kind in TensorType if columns % kind.block_values == 0]
        vector = name.endswith((".bias", "norm.weight"))
        kind = TensorType.F32 if vector else draw(st.sampled_from(allowed))
        tensors[name] = Tensor(name, kind, rows, columns)
    return it, tensors


@given(models())
def test_tensors_are_aligned_and_apart(model: Model) -> None:
    for unit in units_of(*model):
        end = 0
        for placed in unit.tensors.values():
            assert placed.offset % ALIGNMENT == 0
            assert placed.offset >= end
            end = placed.offset + placed.n_bytes
        assert end <= unit.n_bytes < end + ALIGNMENT
        assert unit.n_bytes % ALIGNMENT == 0


@given(models())
def test_chunks_of_the_head_share_its_rows_and_are_no_larger_than_a_layer(model: Model) -> None:
    it, tensors = model
    units = units_of(it, tensors)
    layers, chunks = units[: it.n_layer], units[it.n_layer :]
    assert [unit.layer for unit in layers] == list(range(it.n_layer))
    limit = max(unit.n_bytes for unit in layers)
    next_row = 0
    for unit in chunks:
        assert unit.layer is None
        assert unit.rows is not None
        assert unit.rows == unit.tensors["output"].rows
        assert unit.rows.start == next_row < unit.rows.stop
        assert unit.n_bytes <= limit
        next_row = unit.rows.stop
    assert next_row == it.n_vocab
    assert ["output_norm" in unit.tensors for unit in chunks] == [True] + [False] * (
        len(chunks) - 1
    )
    sizes = [len(unit.rows or ()) for unit in chunks]
    assert len(set(sizes[:-1])) <= 1
    if sizes[0] >= CHUNK_ROWS_MULTIPLE and len(sizes) > 1:
        assert sizes[0] % CHUNK_ROWS_MULTIPLE == 0


@given(models(), st.integers(1, 5))
def test_nor_is_the_chunk_with_the_norm_where_it_fits_exactly(model: Model, count: int) -> None:
    it, tensors = model
    head = "token_embd.weight" if it.tied else "output.weight"
    limit = max(unit.n_bytes for unit in units_of(it, tensors)[: it.n_layer])
    # As many rows as this many layers' bytes hold: without the norm every chunk would be full.
    step = CHUNK_ROWS_MULTIPLE if limit // tensors[head].row_bytes >= CHUNK_ROWS_MULTIPLE else 1
    rows = count * (limit // tensors[head].row_bytes // step * step)
    tensors = tensors | {head: replace(tensors[head], rows=rows)}
    assert all(unit.n_bytes <= limit for unit in units_of(it, tensors))


@given(models())
def test_every_row_of_every_tensor_travels_once(model: Model) -> None:
    it, tensors = model
    rows: dict[str, list[int]] = {}
    for unit in units_of(it, tensors):
        for placed in unit.tensors.values():
            rows.setdefault(placed.tensor.name, []).extend(placed.rows)
    # An embedding that is not the head as well is looked up on the host.
    looked_up = set[str]() if it.tied else {"token_embd.weight"}
    assert set(rows) == set(tensors) - looked_up
    for name, found in rows.items():
        assert found == list(range(tensors[name].rows)), name


@given(models())
def test_a_model_as_described_passes_its_own_check(model: Model) -> None:
    it, tensors = model
    check_tensors("a model", it, tensors)


def read_back(unit: Unit, out: NDArray[np.uint8], whole: Mapping[str, bytearray]) -> None:
    for placed in unit.tensors.values():
        first = placed.rows.start * placed.tensor.row_bytes
        whole[placed.tensor.name][first : first + placed.n_bytes] = out[
            placed.offset : placed.offset + placed.n_bytes
        ].tobytes()


@pytest.mark.parametrize(
    "spec",
    [
        Spec(arch="llama"),
        Spec(arch="qwen2", tied=False),
        Spec(arch="gemma3", n_vocab=5000, n_layer=7),
    ],
    ids=lambda spec: str(spec.arch),
)
def test_the_units_hold_the_bytes_of_the_file(spec: Spec) -> None:
    with ModelFile.open(make_model(spec)) as model:
        out = np.full(model.largest_bytes + 100, 0xAA, np.uint8)
        whole = {name: bytearray(t.n_bytes) for name, t in model.gguf.tensors.items()}
        for unit in model.units:
            filled = model.fill(unit, out)
            assert filled.base is out or filled.base is out.base
            assert len(filled) == unit.n_bytes
            gaps = np.ones(unit.n_bytes, bool)
            for placed in unit.tensors.values():
                gaps[placed.offset : placed.offset + placed.n_bytes] = False
            assert not filled[gaps].any()
            read_back(unit, out, whole)
        assert (out[model.largest_bytes :] == 0xAA).all()
        for name, data in whole.items():
            if name != "token_embd.weight" or spec.tied:
                assert bytes(model.gguf.data(name)) == data, name


def test_a_buffer_that_is_too_small_is_not_written_past() -> None:
    with ModelFile.open(make_model(Spec(arch="llama"))) as model, pytest.raises(AssertionError):
        fill(model.units[0], model.gguf.read, np.empty(model.units[0].n_bytes - 256, np.uint8))


@pytest.mark.real
def test_a_real_model_is_cut_into_units_of_about_one_layer(smollm2: Path) -> None:
    with ModelFile.open(smollm2) as model:
        it = model.hyperparameters
        assert (it.n_layer, it.n_embd, it.n_head, it.n_head_kv, it.head_dim) == (30, 576, 9, 3, 64)
        assert it.tied
        assert it.rope(0).n_rot == 64
        layer = model.units[0].n_bytes
        assert model.largest_bytes == layer
        assert all(unit.n_bytes > 0.9 * layer for unit in model.units[:-1])
        # What travels is what the file holds, but for the alignment.
        total = sum(unit.n_bytes for unit in model.units)
        held = sum(tensor.n_bytes for tensor in model.gguf.tensors.values())
        assert held <= total < 1.001 * held


@pytest.mark.real
def test_gemma_has_windows_norms_and_heads_of_its_own(gemma3: Path) -> None:
    with ModelFile.open(gemma3) as model:
        it = model.hyperparameters
        assert [it.is_windowed(layer) for layer in range(12)] == [True] * 5 + [False] + [
            True
        ] * 5 + [False]
        assert (it.window(0), it.window(5)) == (512, 0)
        assert (it.q_width, it.kv_width, it.head_dim) == (1024, 256, 256)
        assert it.qk_norm
        assert it.post_norms
        # Radians per position of the second pair: base ** (-2 / 256).
        assert it.rope(0).inverse_frequencies[1] == pytest.approx(1e4 ** (-1 / 128), rel=1e-6)
        assert it.rope(5).inverse_frequencies[1] == pytest.approx(1e6 ** (-1 / 128), rel=1e-6)
        kinds = {placed.tensor.type for placed in model.units[0].tensors.values()}
        assert {TensorType.Q5_0, TensorType.Q4_K, TensorType.F32} <= kinds


def test_scaled_rotations(tmp_path: Path) -> None:
    plain = make_model(Spec(arch="llama"))
    with ModelFile.open(plain) as model:
        base = model.hyperparameters.rope(0).inverse_frequencies
    assert base == pytest.approx(10_000.0 ** (-np.arange(16) / 16), rel=1e-6)

    def rope(metadata: dict[str, object], divisors: NDArray[np.float32] | None = None) -> Rope:
        tensors = {} if divisors is None else {"rope_freqs.weight": divisors}
        named = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
        path = write_variant(plain, tmp_path / f"{len(list(tmp_path.iterdir()))}", named, tensors)
        with ModelFile.open(path) as model:
            return model.hyperparameters.rope(0)

    linear = rope({"type": "linear", "factor": 4.0, "attn_factor": 0.5})
    assert linear.inverse_frequencies == pytest.approx(base / 4, rel=1e-6)
    assert linear.magnitude == 0.5
    none = rope({"type": "none", "factor": 4.0})
    assert np.array_equal(none.inverse_frequencies, base)
    divisors = np.linspace(1, 8, 16).astype(np.float32)
    divided = rope({}, divisors)
    assert divided.inverse_frequencies == pytest.approx(base / divisors, rel=1e-6)
    yarn = rope({"type": "yarn", "factor": 4.0, "original_context_length": 256})
    # Fast pairs stay, slow ones are stretched like linear ones, one ramp between them.
    share = yarn.inverse_frequencies / base
    assert share[0] == pytest.approx(1, rel=1e-6)
    assert share[-1] == pytest.approx(0.25, rel=1e-6)
    assert (np.diff(share) <= 1e-7).all()
    assert yarn.magnitude == pytest.approx(1 + 0.1 * np.log(4))
