"""Of the spans of many passes, those of one. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence

from vram_conductor.worker.pipeline.streams import Span


def last_pass(spans: Sequence[Span]) -> list[Span]:
    """Of the last whole pass, from 0 ms on."""
    last = max((span.at_pass for span in spans if span.stream == "compute"), default=0)
    # Serial passes all have the number 0.
    found = {(span.stream, span.unit): span for span in spans if span.at_pass == last}
    begin_ms = min((span.start_ms for span in found.values()), default=0.0)
    return [
        Span(span.stream, span.unit, span.start_ms - begin_ms, span.end_ms - begin_ms)
        for span in found.values()
    ]


def each_stream_ms(spans: Sequence[Span]) -> tuple[float, float]:
    """How long there were transfers, and computations."""
    sums = {"transfer": 0.0, "compute": 0.0}
    for span in spans:
        sums[span.stream] += span.ms
    return sums["transfer"], sums["compute"]
