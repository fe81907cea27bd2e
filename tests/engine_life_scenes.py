"""The layer engine's life: what a step leaves behind, what it refuses, and how it ends.

A scene is a class of tests that take ``site``; tests/worker and tests/gpu inherit from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_scenes import LLAMA, Site, cosines, ids, room, whole
from numpy.typing import NDArray
from quantised_models import make_quantised
from scene import refusal

from vram_conductor.protocol.errors import Code
from vram_conductor.worker.pipeline.forward import Batch, Capacity
from vram_conductor.worker.pipeline.layer_engine import LayerEngine

CLOCK_MS = 0.002
"""Resolution of a GPU's events, and some."""

ROOM = Capacity(n_ctx=64, sequences=2, tokens_max=16, wanted_max=16)
PROMPT, REST = Batch.of(ids(9), 0, wanted=range(9)), Batch.of(ids(4, 1), 9, wanted=[3, 0])


def say(engine: LayerEngine, step: Any = None) -> NDArray[np.float32]:
    """A prompt and what follows; all logits."""
    step = step or engine.step
    return np.concatenate([step(PROMPT), step(REST)])


class LifeScenes:
    def test_the_order_of_things_changes_no_bit(self, site: Site) -> None:
        """Serial or overlapped, whatever the window, whatever stays on the device."""
        path = make_quantised(LLAMA)
        with site.open(path, ROOM) as engine:
            right = say(engine)
            assert engine.lengths == [13, 0]
            engine.reset()
            assert engine.lengths == [0, 0]
            np.testing.assert_array_equal(say(engine, engine.step_serial), right)
            engine.reset()
            # One after the other, with layers of the next step ahead in the slots.
            np.testing.assert_array_equal(engine.step(PROMPT), right[:9])
            np.testing.assert_array_equal(engine.step_serial(REST), right[9:])
            engine.reset()
            np.testing.assert_array_equal(say(engine), right)
        for window, resident in ((3, 0), (4, 1), (2, 2), (2, 3)):
            with site.open(path, ROOM, window_layers=window, resident_layers=resident) as engine:
                np.testing.assert_array_equal(say(engine), right)
                np.testing.assert_array_equal(say(engine), right)

    def test_the_best_tokens(self, site: Site) -> None:
        with site.open(make_quantised(LLAMA), ROOM) as engine:
            best = engine.step(PROMPT).argmax(-1)
            assert engine.step_best(PROMPT).tolist() == best.tolist()
            assert engine.lengths == [9, 0]

    def test_nothing_wanted(self, site: Site) -> None:
        with site.open(make_quantised(LLAMA), ROOM) as engine:
            right = say(engine)
            engine.reset()
            logits = engine.step(Batch.of(PROMPT.tokens, 0, wanted=[]))
            assert logits.shape == (0, LLAMA.n_vocab)
            np.testing.assert_array_equal(engine.step(REST), right[9:])

    def test_going_back(self, site: Site) -> None:
        """A sequence that starts anew in the middle is what it would be without the rest."""
        with site.open(make_quantised(LLAMA), ROOM) as engine:
            right = say(engine)
            engine.step(Batch.of(ids(5, 7), 5))
            assert engine.lengths == [10, 0]
            again = engine.step(Batch.of(PROMPT.tokens[3:], 3, wanted=range(6)))
            assert cosines(again, right[3:9]).min() > 0.9999
            assert cosines(engine.step(REST), right[9:]).min() > 0.9999

    @pytest.mark.parametrize(
        ("batch", "code", "reason"),
        [
            (Batch.of([1] * 17, 9), Code.INVALID_ARGUMENT, "batch_too_large"),
            (Batch.of([320], 9), Code.INVALID_ARGUMENT, "token_out_of_range"),
            (Batch.of([-1], 9), Code.INVALID_ARGUMENT, "token_out_of_range"),
            (Batch.of([1], 0, 2), Code.INVALID_ARGUMENT, "sequence_out_of_range"),
            (Batch.of([1], 10), Code.INVALID_ARGUMENT, "position_gap"),
            (Batch.of([1] * 4, [62, 63, 64, 65]), Code.OUT_OF_RANGE, "context_full"),
            (Batch.of([1], 9, wanted=[0] * 17), Code.INVALID_ARGUMENT, "too_many_wanted"),
            (Batch.of([1], 9, wanted=[1]), Code.INVALID_ARGUMENT, "wanted_out_of_range"),
        ],
    )
    def test_what_is_refused_changes_nothing(
        self, site: Site, batch: Batch, code: Code, reason: str
    ) -> None:
        with site.open(make_quantised(LLAMA), ROOM) as engine:
            right = say(engine)
            engine.reset()
            engine.step(PROMPT)
            refused = refusal(lambda: engine.step(batch))
            assert (refused.code, refused.reason) == (code, reason)
            assert refused.details
            assert engine.lengths == [9, 0]
            np.testing.assert_array_equal(engine.step(REST), right[9:])

    def test_the_context_to_its_last_position(self, site: Site) -> None:
        with site.open(make_quantised(LLAMA), room(64, n_ctx=64)) as engine:
            engine.step(whole(ids(64)))
            assert engine.lengths == [64]
            assert refusal(lambda: engine.step(Batch.of([1], 64))).reason == "context_full"

    def test_closed_is_closed(self, site: Site) -> None:
        engine = site.open(make_quantised(LLAMA), ROOM)
        say(engine)
        engine.close()
        engine.close()
        for use in (lambda: engine.step(PROMPT), engine.reset, engine.spans):
            refused = refusal(use)
            assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "engine_closed")

    def test_when_everything_ran(self, site: Site) -> None:
        """Each layer's transfer ends before its computation begins; slots are two."""
        with site.open(make_quantised(LLAMA), ROOM, timed=True) as engine:
            for _ in range(3):
                engine.step(Batch.of(ids(9), 0))
            spans = engine.spans()
        units = len(engine.model.units)
        computed = [span for span in spans if span.stream == "compute"]
        carried = [span for span in spans if span.stream == "transfer"]
        assert [span.unit for span in computed] == list(range(units)) * 3
        # Two layers of the pass that will not come are in the slots.
        assert [span.unit for span in carried] == [*list(range(units)) * 3, 0, 1]
        for at, span in enumerate(computed):
            assert carried[at].end_ms <= span.start_ms + CLOCK_MS
            if at + 2 < len(carried):
                assert span.end_ms <= carried[at + 2].start_ms + CLOCK_MS

    def test_bytes(self, site: Site) -> None:
        """The window and the cache depend on the largest layer and the context, not on how many
        layers there are and how many stay."""
        path = make_quantised(LLAMA)
        with site.open(path, ROOM) as engine:
            plain = engine.figures
            sizes = [unit.n_bytes for unit in engine.model.units]
        assert plain.window_bytes == 2 * max(sizes)
        assert plain.streamed_bytes == sum(sizes)
        # 3 layers, keys and values of 2 sequences × 64 positions × 2 heads × 64, two bytes each.
        assert plain.kv_bytes == 3 * 2 * 2 * 64 * 2 * 64 * 2
        with site.open(path, ROOM, window_layers=3, resident_layers=1) as engine:
            other = engine.figures
        assert other.window_bytes == 3 * max(sizes)
        assert other.resident_bytes == sizes[1]
        assert other.streamed_bytes == sum(sizes) - sizes[1]
        assert other.device_bytes - plain.device_bytes == max(sizes) + sizes[1]
