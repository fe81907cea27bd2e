"""What a pipeline's steps take, by arithmetic: two streams, and nothing that disturbs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vram_conductor.worker.pipeline.schedule import Step
from vram_conductor.worker.pipeline.streams import Span, Stream


def simulate(
    steps: Iterable[Step], transfer_ms: Sequence[float], compute_ms: Sequence[float]
) -> list[Span]:
    """When each step runs if it takes as long as said and waits for nothing but its stream, its
    unit's transfer, and the computation that its slot was used by.

    Args:
        transfer_ms, compute_ms: per unit.

    Returns:
        One span per step, in the steps' order, from 0 on; ``makespan_ms`` of it is how long
        the steps take.
    """
    free_ms: dict[Stream, float] = {"transfer": 0.0, "compute": 0.0}
    filled_ms: dict[int, float] = {}
    read_ms: dict[int, float] = {}
    spans: list[Span] = []
    for step in steps:
        waits, took = (read_ms, transfer_ms) if step.kind == "transfer" else (filled_ms, compute_ms)
        ready_ms = 0.0 if step.slot is None else waits.get(step.slot, 0.0)
        start_ms = max(free_ms[step.kind], ready_ms)
        end_ms = start_ms + took[step.unit]
        free_ms[step.kind] = end_ms
        if step.slot is not None:
            (filled_ms if step.kind == "transfer" else read_ms)[step.slot] = end_ms
        spans.append(Span(step.kind, step.unit, start_ms, end_ms, step.at_pass))
    return spans
