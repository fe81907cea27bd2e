"""What fits, by the real broker, worker and llama.cpp; and models that are split into parts."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest
from gguf_models import Spec, make_model, make_parts
from scene import SMOL, Scene, refusal, some_tokens, until

from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.fitting import KV_TYPES
from vram_conductor.protocol.split_files import combined_sha256
from vram_conductor.protocol.stamp import model_stamp

SPLIT = Spec(vocab="bytes", n_layer=4, seed=21)


@pytest.mark.real
@pytest.mark.parametrize("others", [0, 1])
def test_what_fits_is_admitted_and_the_next_is_not(scene: Scene, others: int) -> None:
    conductor = scene.conductor
    for _ in range(others):
        conductor.register("other", SMOL, n_ctx=1000, kv_type="q8_0")
    with scene.undisturbed():
        report = conductor.fit(SMOL, slots=2)
    assert [row.kv_type for row in report.rows] == list(KV_TYPES)
    largest = report.n_ctx_train
    assert largest == 8192
    assert any(row.n_ctx < largest for row in report.rows), "nothing was refused: no test"
    for row in report.rows:
        assert row.n_ctx, row
        admit = partial(conductor.register, model=SMOL, kv_type=row.kv_type, slots=2)
        if row.n_ctx < largest:
            error = refusal(partial(admit, "more", n_ctx=row.n_ctx + 256))
            assert error.reason == LEDGER_DENY
        promised = scene.device().promised.promised_bytes
        info = admit("new", n_ctx=row.n_ctx).info
        assert info is not None
        grown = scene.device().promised.promised_bytes - promised
        # What was measured is at most what was estimated.
        assert grown <= row.requested_bytes
        pool_bytes = row.kv_bytes + row.compute_bytes + row.recurrent_bytes
        assert info.pool_bytes <= pool_bytes
        assert info.state_bytes == row.state_bytes
        conductor.unregister("new")


def test_a_model_that_is_not_here_is_refused_as_register_would(scene: Scene) -> None:
    with scene.undisturbed():
        error = refusal(lambda: scene.conductor.fit("nonsense"))
        assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_model")
        assert refusal(lambda: scene.conductor.fit(SMOL, device="cuda:9")).reason == (
            "no_such_device"
        )


def test_a_split_model_says_what_the_whole_one_says(scene: Scene, tmp_path: Path) -> None:
    parts = make_parts(SPLIT, tmp_path)
    assert len(parts) == 4
    conductor = scene.conductor
    conductor.register("whole", str(make_model(SPLIT)), n_ctx=512)
    info = conductor.register("split", str(parts[0]), n_ctx=512).info
    assert info is not None
    rows = conductor.fit(str(parts[0])).rows
    assert all(row.shares_weights for row in rows)
    assert conductor.fit(str(parts[0])).file_bytes == sum(part.stat().st_size for part in parts)
    prompt = some_tokens(12, 5)
    said = {name: scene.run(name, prompt, max_tokens=40).ids for name in ("whole", "split")}
    assert said["split"] == said["whole"]
    assert len(set(said["whole"])) > 10, "a model that repeats itself proves nothing"
    digests = [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts]
    found = until(lambda: model_stamp(parts[0]), "the worker has hashed all parts")
    assert found == combined_sha256(digests)


def test_a_part_that_is_missing_or_swapped_is_refused_by_name(scene: Scene, tmp_path: Path) -> None:
    parts = make_parts(SPLIT, tmp_path)
    first, held = str(parts[0]), parts[1].rename(tmp_path / "held")
    conductor = scene.conductor
    with scene.undisturbed():
        error = refusal(lambda: conductor.register("split", first, n_ctx=512))
        assert error.reason == "model_part_missing"
        assert parts[1].name in error.message
        parts[2].rename(parts[1])
        held.rename(parts[2])
        register = partial(conductor.register, "split", n_ctx=512)
        for ask in (partial(conductor.fit, first), partial(register, first)):
            error = refusal(ask)
            assert error.reason == "wrong_model_part"
            assert parts[1].name in error.message
        error = refusal(partial(register, str(parts[3])))
        assert (error.reason, error.details["first"]) == ("not_the_first_part", parts[0].name)
