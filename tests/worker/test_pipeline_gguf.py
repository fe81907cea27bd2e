"""Files for the layer pipeline: what is read of good ones, and how damaged ones are refused."""

from __future__ import annotations

import random
import resource
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_models import Spec, make_model
from gguf_variants import write_variant

from vram_conductor.protocol.errors import (
    ConductorError,
    DataLoss,
    InvalidArgument,
    NotFound,
)
from vram_conductor.worker.gguf_header import read_header
from vram_conductor.worker.pipeline.gguf_tensors import GgufTensors
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.tensor_types import TensorType

SPECS = {
    "llama": Spec(arch="llama", vocab="bytes", chat_template="{}"),
    "qwen2": Spec(arch="qwen2", tied=False),
    "gemma3": Spec(arch="gemma3"),
}


def test_the_types_are_those_of_the_reference_package() -> None:
    for kind in TensorType:
        reference = gguf.GGMLQuantizationType(int(kind))
        assert kind.name == reference.name
        assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[reference]


def assert_as_the_reference_reads(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with GgufTensors.open(path) as found:
        for name, value in found.metadata.items():
            field = reader.get_field(name)
            assert field is not None
            assert field.contents() == value, name
        assert list(found.tensors) == [tensor.name for tensor in reader.tensors]
        for reference in reader.tensors:
            tensor = found.tensors[reference.name]
            shape = (*(int(n) for n in reference.shape), 1)[:2]
            assert (tensor.columns, tensor.rows) == shape
            data = np.ascontiguousarray(reference.data).view(np.uint8).ravel()
            assert np.array_equal(found.data(reference.name), data), reference.name


@pytest.mark.parametrize("arch", SPECS)
def test_a_file_is_read_as_the_reference_reads_it(arch: str) -> None:
    assert_as_the_reference_reads(make_model(SPECS[arch]))


@pytest.mark.real
def test_so_is_a_real_one(smollm2: Path) -> None:
    assert_as_the_reference_reads(smollm2)
    with GgufTensors.open(smollm2) as found:
        assert found.metadata["llama.block_count"] == 30
        assert "tokenizer.ggml.tokens" not in found.metadata
        assert found.tensors["blk.0.attn_q.weight"].type == TensorType.Q4_1


def test_a_closed_file_gives_no_data() -> None:
    found = GgufTensors.open(make_model(SPECS["llama"]))
    found.close()
    found.close()
    with pytest.raises(ValueError, match="was closed"):
        found.data("output_norm.weight")


@pytest.mark.parametrize("arch", SPECS)
def test_what_is_cut_off_is_said_with_numbers(arch: str, tmp_path: Path) -> None:
    whole = make_model(SPECS[arch]).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-4000])
    with pytest.raises(DataLoss, match="is truncated: tensor") as raised:
        ModelFile.open(path)
    assert raised.value.reason == "truncated_model"
    assert raised.value.details["file_bytes"] == len(whole) - 4000
    # The last tensor of the file ends before the padding behind it.
    missing = raised.value.details["needed_bytes"] - raised.value.details["file_bytes"]
    assert 4000 - 32 < missing <= 4000


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, rng: random.Random) -> None:
    whole = make_model(SPECS["llama"]).read_bytes()
    data_offset = read_header(str(make_model(SPECS["llama"]))).data_offset
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 23, 24, *(rng.randrange(len(whole) - 32) for _ in range(60))]:
        path.write_bytes(whole[:size])
        with pytest.raises((InvalidArgument, DataLoss)) as raised:
            ModelFile.open(path)
        wanted = "truncated_model" if size >= data_offset else "bad_model"
        assert raised.value.reason == wanted, size
        assert "get the file again" in str(raised.value)


def test_a_damaged_header_is_an_error_of_ours_or_harmless(
    tmp_path: Path, rng: random.Random
) -> None:
    source = make_model(SPECS["llama"])
    whole, end = bytearray(source.read_bytes()), read_header(str(source)).data_offset
    path, reasons = tmp_path / "damaged.gguf", list[str]()
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(4, end)
            width = rng.choice((1, 4, 8))
            value = rng.choice((0, 1, 255, (1 << 8 * width) - 1, rng.getrandbits(8 * width)))
            damaged[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        path.write_bytes(damaged)
        try:
            ModelFile.open(path).close()
        except ConductorError as error:
            reasons.append(error.reason)
    assert len(reasons) > 100
    known = ("bad_model", "unsupported_", "truncated_model", "split_model")
    assert [reason for reason in reasons if not reason.startswith(known)] == []


def test_a_damaged_dimension_is_refused_before_it_costs_anything(tmp_path: Path) -> None:
    for key in ("block_count", "embedding_length", "attention.key_length", "vocab_size"):
        path = write_variant(
            make_model(SPECS["llama"]), tmp_path / f"{key}.gguf", {f"llama.{key}": (1 << 32) - 1}
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ConductorError) if key != "vocab_size" else nullcontext():
            ModelFile.open(path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        ModelFile.open(tmp_path / "missing.gguf")
    with pytest.raises(NotFound):
        ModelFile.open(tmp_path)
    text = tmp_path / "text.gguf"
    text.write_text("this is no model at all, but it is long enough for a header")
    with pytest.raises(InvalidArgument, match="is not a GGUF file"):
        ModelFile.open(text)


def test_a_header_that_promises_too_much_ends_at_once(tmp_path: Path) -> None:
    # One key whose value is an array of 2^60 strings.
    key = b"a.b"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "greedy.gguf"
    path.write_bytes(head + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(64))
    with pytest.raises(InvalidArgument, match="header cannot be read at byte"):
        ModelFile.open(path)


TIGHT = """
import resource, sys
from vram_conductor.protocol.errors import Internal
from vram_conductor.worker.gguf_header import read_header
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    read_header(sys.argv[1])
except Internal as error:
    print(error.reason, error.info.retryable)
"""


def test_a_header_that_cannot_be_mapped_now_is_no_bug(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(make_model(SPECS["llama"]).read_bytes())
    assert read_header(str(path)).tensors
    with path.open("r+b") as file:
        file.truncate(4 << 30)  # sparse
    command = [sys.executable, "-c", TIGHT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["load_failed", "True"]
