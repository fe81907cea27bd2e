"""What is measured of one open engine: a batch that decodes, or a prompt."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any, TypeVar

from vram_conductor.worker.bench.bench_memory import BenchMemory
from vram_conductor.worker.bench.decoding import decode_in_turn, random_tokens, step_ms
from vram_conductor.worker.bench.layers_setting import LayersSetting
from vram_conductor.worker.bench.pass_spans import each_stream_ms, last_pass
from vram_conductor.worker.pipeline.forward import Batch
from vram_conductor.worker.pipeline.layer_engine import LayerEngine
from vram_conductor.worker.pipeline.schedule import bound
from vram_conductor.worker.pipeline.streams import Span

T = TypeVar("T")

ROW_S = 1.8
"""A batch is measured for about so long, all ways together."""


class Rows:
    """As the client is told them.

    Args:
        h2d_gb_s: rate of pinned copies.
    """

    def __init__(self, setting: LayersSetting, memory: BenchMemory, h2d_gb_s: float) -> None:
        self._it, self._memory, self._h2d_gb_s = setting, memory, h2d_gb_s

    def decode(self, engine: LayerEngine, batch: int, most: int, left_s: float) -> dict[str, Any]:
        """So many sequences side by side, see ``LayersFound.decode``.

        Args:
            most: sequences that the engine has room for.
            left_s: they are measured for no longer, but a little in any case.
        """

        def begin() -> None:
            engine.reset()
            engine.spans()

        took = decode_in_turn(
            # The last one's spans are those of a serial pass.
            (engine.step_best, engine.step, engine.step_serial),
            batch,
            engine.model.hyperparameters.n_vocab,
            steps=self._it.steps,
            seconds=max(0.0, min(ROW_S, left_s)),
            begin=begin,
        )
        transfer_ms, compute_ms = each_stream_ms(last_pass(engine.spans()))
        memory = self.memory(engine)
        # An engine for just this batch would have a smaller KV cache and smaller activations.
        per_batch = (memory["kv_bytes"] + memory["activation_bytes"]) * batch // most
        beside = max(0, (memory["grown_bytes"] or 0) - memory["counted_bytes"])
        return {
            "batch": batch,
            **dict(zip(("step_ms", "logits_ms", "serial_ms"), took, strict=True)),
            "transfer_ms": transfer_ms,
            "compute_ms": compute_ms,
            "bound_ms": engine.figures.streamed_bytes / self._h2d_gb_s / 1e6,
            "own_bytes": memory["window_bytes"] + memory["resident_bytes"] + per_batch + beside,
            "memory": memory,
        }

    def prefill(self, engine: LayerEngine, until: float) -> dict[str, Any]:
        """One prompt in one pass, on the same memory: serial, overlapped from empty slots, and
        overlapped after a pass that has brought the first layers. In turn: clocks change.

        Args:
            until: on ``time.monotonic``'s clock; once at least.
        """
        it = self._it
        took: dict[str, list[float]] = {"serial": [], "single": [], "overlapped": []}
        spans: dict[str, list[Span]] = {}
        alone: list[tuple[float, float]] = []
        batch = Batch.of(random_tokens(it.prompt_tokens, engine.model.hyperparameters.n_vocab), 0)
        steps = {"serial": engine.step_serial, "single": engine.step, "overlapped": engine.step}
        engine.spans()
        for at in range(1 + it.repeats):
            if at and time.monotonic() > until:
                break
            for name, step in steps.items():
                took[name].append(step_ms(step, batch))
                spans[name] = last_pass(engine.spans())
            alone.append(each_stream_ms(spans["serial"]))
        # The first one is a warm-up, where there was time for others.
        transfer_ms, compute_ms = map(statistics.median, zip(*_warm(alone), strict=True))
        return {
            "tokens": it.prompt_tokens,
            **{f"{name}_ms": _warm(values) for name, values in took.items()},
            "serial_spans": spans["serial"],
            "overlapped_spans": spans["overlapped"],
            "transfer_ms": transfer_ms,
            "compute_ms": compute_ms,
            "bound": bound(transfer_ms, compute_ms),
            "memory": self.memory(engine),
        }

    def memory(self, engine: LayerEngine) -> dict[str, Any]:
        """Bytes of an open engine."""
        figures = engine.figures
        return asdict(figures) | {
            "counted_bytes": figures.device_bytes,
            "grown_bytes": self._memory.grown_bytes(),
        }


def _warm(values: list[T]) -> list[T]:
    return values[1:] or values
