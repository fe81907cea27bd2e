"""llama.cpp measured beside a model whose layers travel."""

from __future__ import annotations

from typing import Any

import pytest
from quantised_models import Quantised, make_quantised

from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.worker.bench.llama_reference import _Reference, measure_reference


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(make_quantised(Quantised(n_vocab=320)))


def test_llama_cpp_is_measured_beside(tiny: str) -> None:
    found = measure_reference(
        tiny,
        "cpu",
        1,
        [(1, 0), (3, 0), (300, 0)],
        n_ctx=64,
        prompt_tokens=16,
        seconds=60,
        partial=False,
    )
    assert [row["batch"] for row in found["rows"]] == [1, 3]
    assert all(row["tokens_s"] > 0 for row in found["rows"])
    assert len(found["prefill_ms"]) == 3
    assert found["phases"].keys() == {"loads", "decode", "prefill"}
    assert found["notes"] == ["llama.cpp has at most 256 sequences, not 300"]


def test_as_many_layers_as_fit_go_to_the_gpu(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose use is known: what a context takes grows with its sequences."""
    loads: list[int] = []

    def used(reference: _Reference, sequences: int) -> int:
        return (100 + sequences) * 1000 + reference._gpu_layers * reference._each(sequences)

    def load(reference: _Reference, layers: int) -> None:
        if not loads or layers != reference._gpu_layers:
            loads.append(layers)
        reference._gpu_layers = layers

    def decode(reference: _Reference, sequences: int, limit: int, until: float) -> Any:
        taken = used(reference, sequences)
        return [1.0] if taken <= limit else [], taken

    monkeypatch.setattr(_Reference, "_load_with", load)
    monkeypatch.setattr(_Reference, "_decode", decode)
    monkeypatch.setattr(_Reference, "_prefill", lambda reference, count: [1.0])
    with _Reference(tiny, "cpu", 1, 64) as reference:
        # In the order of their worth; the last has no room for what it takes beside.
        wanted = {1: 2, 64: 3, 8: 1}
        rooms = [
            (batch, (100 + batch) * 1000 + layers * reference._each(batch) + 5)
            for batch, layers in wanted.items()
        ]
        found = reference.measure([*rooms, (2, 50_000)], 8, 60.0, partial=True)
    assert {row["batch"]: row["gpu_layers"] for row in found["rows"]} == wanted
    assert len(loads) <= 2 * (len(wanted) + 1)
    assert found["notes"] == [
        "batch 2: with 0 layers on the GPU llama.cpp uses 0 MiB there, and the pipeline 0 MiB"
    ]


def test_more_sequences_than_llama_cpp_has_are_refused(tiny: str) -> None:
    from vram_conductor.worker.llama.bare import BareModel, Room, sequences_max
    from vram_conductor.worker.llama.options import EngineOptions

    with BareModel(tiny, EngineOptions(threads=1), 0) as model:
        with pytest.raises(OutOfRange) as raised:
            model.open(Room(64, sequences=sequences_max() + 1))
        assert raised.value.reason == "too_many_sequences"
        assert model.tokenize("no tokenizer here") == []
