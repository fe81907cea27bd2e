"""The picture of a model whose layers travel. ``pyplot`` is handed in."""

from __future__ import annotations

from typing import Any

from vram_conductor.client.bench_colours import BAD, GOOD, LIMIT, PALE, ROOM
from vram_conductor.client.bench_report import BenchReport

WAYS = {
    "partial": ("llama.cpp, same GPU memory", BAD, "o-"),
    "cpu": ("llama.cpp, CPU", "#c98a2b", "s-"),
    "all": ("llama.cpp, everything on the GPU", "#777777", "^--"),
}
"""Label, colour, style."""


def layers(pyplot: Any, report: BenchReport) -> None:
    """Tokens/s over the batch, both logarithmic: ours, what the copies allow, and the others."""
    page, axes = pyplot.subplots(figsize=(9, 6))
    rows = report.data["batches"]
    batches = [row["batch"] for row in rows]
    if rows:
        bound = [1e3 * row["batch"] / row["bound_ms"] for row in rows]
        axes.plot(batches, bound, ":", color=LIMIT, label="what the copy rate allows")
    for key, label, color, style in (
        ("tokens_s", "layers travel while others compute", GOOD, "o-"),
        ("logits_tokens_s", "the same, all logits copied, as llama.cpp does", GOOD, "o--"),
        ("serial_tokens_s", "one after the other, all logits copied", PALE, "o-"),
    ):
        axes.plot(batches, [row[key] for row in rows], style, color=color, label=label)
    for way, (label, color, style) in WAYS.items():
        theirs = report.data["beside"].get(way, {}).get("rows", [])
        if theirs:
            rates = [row["tokens_s"] for row in theirs]
            axes.plot([row["batch"] for row in theirs], rates, style, color=color, label=label)
    if rows:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("sequences that decode side by side")
    axes.set_ylabel("tokens/s")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    page.suptitle("decode with layers that travel through a window, beside llama.cpp")
    page.tight_layout(rect=ROOM)
