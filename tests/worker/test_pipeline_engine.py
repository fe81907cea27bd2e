"""The layer engine on the host: its life, failures in the middle of a step, and its ends."""

from __future__ import annotations

import gc
import itertools
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_life_scenes import PROMPT, REST, ROOM, LifeScenes, say
from engine_scenes import LLAMA, Site, cosines
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantised_models import make_quantised
from scene import refusal, until

from vram_conductor.protocol.errors import DataLoss
from vram_conductor.worker.pipeline.assembly import Assembly, Plan, assemble_host
from vram_conductor.worker.pipeline.forward import Batch
from vram_conductor.worker.pipeline.forward_host import HostForward
from vram_conductor.worker.pipeline.layer_engine import LayerEngine, spread
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.stream_host import HostStreams


@pytest.fixture
def site() -> Site:
    return Site("cpu", 0.999995)


class TestLife(LifeScenes):
    pass


class Faulty(HostForward):
    """Fails when it comes to a unit, or to ``begin`` or ``logits``, as ``failures`` says."""

    failures: list[tuple[object, BaseException]]

    def _meet(self, place: object) -> None:
        if self.failures and self.failures[0][0] == place:
            raise self.failures.pop(0)[1]

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._meet("begin")

    def unit(self, index: int, slot: NDArray[np.uint8]) -> None:
        self._meet(index)
        super().unit(index, slot)

    def logits(self) -> NDArray[np.float32]:
        self._meet("logits")
        return super().logits()


def faulty(path: Path) -> tuple[LayerEngine, list[tuple[object, BaseException]]]:
    """An engine, and the list of failures that it will have."""
    plan = Plan(ModelFile.open(path), ROOM, 2)
    forward = Faulty(plan.model, ROOM)
    forward.failures = []
    return LayerEngine(plan, replace(assemble_host(plan), forward=forward)), forward.failures


@pytest.mark.parametrize("place", ["begin", 0, 1, 3, "logits"])
@pytest.mark.parametrize("serial", [False, True])
def test_a_step_that_fails_leaves_the_engine_usable(place: object, serial: bool) -> None:
    with site_engine() as right_engine:
        right = say(right_engine)
    engine, failures = faulty(make_quantised(LLAMA))
    with engine:
        step = engine.step_serial if serial else engine.step
        other = Batch.of([5, 6], 0, 1)
        engine.step(other)
        engine.step(PROMPT)
        # One in the middle of what is held, one at its end.
        for batch, held in ((Batch.of([7] * 4, 5), [5, 2]), (Batch.of([7] * 4, 5), [5, 2])):
            failures.append((place, DataLoss("gone", "the layer is gone")))
            assert refusal(lambda batch=batch: step(batch)).reason == "gone"  # type: ignore[misc]
            assert engine.lengths == held
        assert not failures
        engine.step(Batch.of(PROMPT.tokens[5:], 5))
        np.testing.assert_allclose(step(REST), right[9:], atol=1e-3)
        engine.reset()
        np.testing.assert_array_equal(say(engine, step), right)


def site_engine() -> LayerEngine:
    return LayerEngine.open(make_quantised(LLAMA), **vars(ROOM))


def test_a_transfer_that_fails_leaves_the_engine_usable() -> None:
    plan = Plan(ModelFile.open(make_quantised(LLAMA)), ROOM, 2)
    broken: list[int] = []

    def fill(unit: int, slot: NDArray[np.uint8]) -> None:
        if unit in broken:
            raise DataLoss("gone", "the file is gone")
        plan.model.fill(plan.model.units[unit], slot)

    streams = HostStreams(fill, 2, plan.slot_bytes)
    with LayerEngine(plan, Assembly(streams, HostForward(plan.model, ROOM), {}, 0)) as engine:
        right = say(engine)
        engine.reset()
        engine.step(PROMPT)
        broken.append(2)
        assert refusal(lambda: engine.step(REST)).reason == "gone"
        assert engine.lengths == [9, 0]
        broken.clear()
        np.testing.assert_array_equal(engine.step(REST), right[9:])


class Interrupting(HostForward):
    """As if somebody pressed Ctrl-C while unit 1 is computed."""

    def unit(self, index: int, slot: NDArray[np.uint8]) -> None:
        main = threading.main_thread().ident
        assert main is not None
        if index == 1:
            signal.pthread_kill(main, signal.SIGINT)
        super().unit(index, slot)


def test_an_interrupted_step_closes_the_engine() -> None:
    """Its threads are in the middle of something."""
    plan = Plan(ModelFile.open(make_quantised(LLAMA)), ROOM, 2)
    forward = Interrupting(plan.model, ROOM)
    engine = LayerEngine(plan, replace(assemble_host(plan), forward=forward))
    with pytest.raises(KeyboardInterrupt):
        engine.step(PROMPT)
    assert refusal(lambda: engine.step(PROMPT)).reason == "engine_closed"
    assert not pipeline_threads()


NAMES = ("pipeline transfer", "pipeline compute")


def pipeline_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in NAMES]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window_layers": 1}, "bad_window"),
        ({"window_layers": 5}, "bad_window"),
        ({"resident_layers": 4}, "bad_resident"),
        ({"resident_layers": -1}, "bad_resident"),
        ({"n_ctx": 0}, "bad_capacity"),
        ({"tokens_max": 0}, "bad_capacity"),
        ({"sequences": 0}, "bad_capacity"),
        ({"wanted_max": 0}, "bad_capacity"),
        ({"device": "tpu:0"}, "no_such_device"),
        ({"n_ctx": 10**9}, "host_memory_short"),
    ],
)
def test_what_cannot_be_opened_leaves_nothing(options: dict[str, Any], reason: str) -> None:
    path = make_quantised(LLAMA)
    refused = refusal(lambda: LayerEngine.open(path, **options))
    assert refused.reason == reason
    assert not pipeline_threads()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert refusal(lambda: LayerEngine.open(tmp_path / "no.gguf")).reason == "no_such_model"


def test_no_thread_stays() -> None:
    with site_engine() as engine:
        say(engine)
        assert len(pipeline_threads()) == 2
    assert not pipeline_threads()


def test_a_dropped_engine_leaves_no_thread() -> None:
    engine = site_engine()
    say(engine)
    assert len(pipeline_threads()) == 2
    del engine
    gc.collect()
    until(lambda: not pipeline_threads(), "both threads have ended")


def test_logits_belong_to_the_caller() -> None:
    """What a step returned is not written to by the next one."""
    with site_engine() as engine:
        first = engine.step(PROMPT)
        kept = first.copy()
        engine.step(REST)
        np.testing.assert_array_equal(first, kept)


@given(n_layer=st.integers(1, 100), data=st.data())
def test_resident_layers_are_spread_evenly(n_layer: int, data: st.DataObject) -> None:
    """Between two that stay, and before the first and after the last together, there are as many
    that travel as anywhere else, up to one."""
    count = data.draw(st.integers(0, n_layer))
    layers = sorted(spread(n_layer, count))
    assert len(layers) == count
    if not count:
        return
    assert layers[0] >= 0
    assert layers[-1] < n_layer
    around = [*layers, layers[0] + n_layer]
    gaps = [after - before for before, after in itertools.pairwise(around)]
    assert max(gaps) - min(gaps) <= 1


def test_any_batches_are_what_whole_texts_would_be(rng: random.Random) -> None:
    """Two texts in random pieces, mixed or alone, now and then from further back: at the end the
    logits are those of each text in one batch."""
    path = make_quantised(replace(LLAMA, n_layer=2, n_ff=128))
    with LayerEngine.open(path, **vars(ROOM)) as engine:
        for _ in range(40):
            texts = [[rng.randrange(320) for _ in range(rng.randint(1, 14))] for _ in range(2)]
            engine.reset()
            while engine.lengths != [len(text) for text in texts]:
                batch = random_pieces(rng, texts, engine.lengths)
                if len(batch):
                    tokens, at, of = batch.T
                    engine.step(Batch.of(tokens, at, of, wanted=[]))
            logits = engine.step(Batch.of([3, 4], engine.lengths, [0, 1], wanted=[0, 1]))
            for sequence, text in enumerate(texts):
                engine.reset()
                right = engine.step(Batch.of([*text, 3 + sequence], 0))
                assert cosines(logits[sequence : sequence + 1], right)[0] > 0.99999


def random_pieces(rng: random.Random, texts: list[list[int]], held: list[int]) -> NDArray[np.int64]:
    """Rows of (token, position, sequence) in any order."""
    rows: list[tuple[int, int, int]] = []
    for sequence, text in enumerate(texts):
        first = rng.randint(max(0, held[sequence] - 2), held[sequence])
        count = rng.randint(0, min(8, len(text) - first))
        rows += [(text[at], at, sequence) for at in range(first, first + count)]
    rng.shuffle(rows)
    return np.array(rows).reshape(-1, 3)
