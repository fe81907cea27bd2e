"""Whether streamed layers compute what llama.cpp does, and whether that comparison can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vram_conductor.worker.bench.decoding import Agreement, compare, greedy
from vram_conductor.worker.bench.llama_steps import Logits
from vram_conductor.worker.bench.llama_text import Said
from vram_conductor.worker.pipeline.forward import Batch
from vram_conductor.worker.pipeline.layer_engine import LayerEngine


@dataclass(frozen=True)
class Agreements:
    """Logits and continuations at the same positions.

    Attributes:
        text: of a real text; without a tokenizer the tokens are drawn.
        same: ours and llama.cpp's, of the same file.
        itself: llama.cpp's with flash attention, and without.
        without: ours with one layer left out, and llama.cpp's: a comparison that this passes says
            nothing.
        without_layer: which one.
        copy: ours, and llama.cpp's of a copy of the file in float32; None for a large one.
        copy_itself: llama.cpp's of that copy with flash attention, and without.
    """

    text: bool
    same: Agreement
    itself: Agreement
    without: Agreement
    without_layer: int
    copy: Agreement | None
    copy_itself: Agreement | None


class IncompleteEngine(LayerEngine):
    """An engine that can leave a layer out.

    Attributes:
        left_out: units whose computation is skipped; they travel all the same.
    """

    left_out: Sequence[int] = ()

    def _compute(self, unit: int, slot: Any) -> None:
        if unit not in self.left_out:
            super()._compute(unit, slot)


def agree(engine: IncompleteEngine, said: Said, theirs: Logits, copy: Logits | None) -> Agreements:
    """Our logits beside llama.cpp's.

    Args:
        engine: with room for one sequence: the text, all of its logits, and what follows.
        theirs, copy: see ``llama_text.read_reference``.
    """
    text = Batch.of(said.tokens, 0, 0, range(len(said.tokens)))
    layer = engine.model.hyperparameters.n_layer // 2
    ours = engine.step(text)
    engine.left_out = [layer]
    engine.reset()
    without = engine.step(text)
    engine.left_out = []
    engine.reset()
    follows = greedy(engine.step, said.prompt, len(said.greedy))
    engine.reset()
    return Agreements(
        text=said.text,
        same=compare(ours, theirs, follows, said.greedy),
        itself=said.itself,
        without=compare(without, theirs),
        without_layer=layer,
        copy=None if copy is None else compare(ours, copy, follows, said.copy_greedy),
        copy_itself=said.copy_itself,
    )
