"""A model whose layers travel, batch by batch, and llama.cpp beside it. *Pure.*"""

from __future__ import annotations

from vram_conductor.client.bench_layers_found import LayersReport
from vram_conductor.client.bench_report import BenchReport, Figure, number
from vram_conductor.client.text import size, table

WAYS = {"partial": "same memory", "cpu": "CPU", "all": "all on GPU"}
"""Columns."""

WHERE = {
    "partial": "with as many layers on the GPU as fit into the same memory",
    "cpu": "on the CPU",
    "all": "with everything on the GPU",
}


def add_beside(report: BenchReport, found: LayersReport) -> None:
    """A row and a sentence for each way to run llama.cpp, and both tables."""
    for way in found.beside:
        ratios = found.ratios(way)
        if ratios:
            at, ratio = max(ratios.items())
            text = f"decode over llama.cpp's, {WAYS[way]}, batch {at}"
            report.add(Figure(f"over_{way}", text, ratio, "x"))
    sentences = [verdict(found, way) for way in found.beside]
    report.notes = [sentence for sentence in sentences if sentence] + report.notes
    report.more = "\n".join(part for part in (batches_table(found), beside_table(found)) if part)


def verdict(found: LayersReport, way: str) -> str:
    """Who is the faster one at which batch; empty where nothing can be compared."""
    ratios = found.ratios(way)
    if not ratios:
        return ""
    parts: list[str] = []
    for word, faster in (("faster", True), ("slower", False)):
        batches = [f"{at} ({it:.2f} x)" for at, it in ratios.items() if (it > 1) == faster]
        if batches:
            parts.append(f"{word} at batch {', '.join(batches)}")
    return f"decode beside llama.cpp {WHERE[way]}: {'; '.join(parts)}"


def batches_table(found: LayersReport) -> str:
    """One row per batch, of the pipeline alone."""
    header = ["batch", "tokens/s", "with logits", "serial", "T ms", "C ms", "share", "memory"]
    header += ["timed"]
    rows: list[list[str]] = []
    for row in found.layers.decode:
        rates = (row.tokens_s, row.logits_tokens_s, row.serial_tokens_s)
        times = (row.transfer_ms, row.compute_ms)
        cells = [str(row.batch), *(number(value, "") for value in (*rates, *times))]
        cells += [f"{100 * row.bound_share:.0f} %", size(row.own_bytes), str(len(row.step_ms))]
        rows.append(cells)
    if not rows:
        return ""
    title = "decode (T, C: transfers, computation alone; share: of what the copies allow)"
    return f"{title}\n{table(header, rows, right=range(len(header)))}"


def beside_table(found: LayersReport) -> str:
    """Tokens/s with all logits beside llama.cpp's, where that was measured."""
    ways = [way for way in WAYS if way in found.beside]
    header = ["batch", "layers travel"]
    for way in ways:
        header += [WAYS[way], "layers"] if way == "partial" else [WAYS[way]]
    rows: list[list[str]] = []
    for row in found.layers.decode:
        cells = [str(row.batch), number(row.logits_tokens_s, "")]
        for way in ways:
            theirs = found.row(way, row.batch)
            cells.append("-" if theirs is None else number(theirs.tokens_s, ""))
            if way == "partial":
                cells.append("-" if theirs is None else str(theirs.gpu_layers))
        if any(cell != "-" for cell in cells[2:]):
            rows.append(cells)
    if not rows:
        return ""
    title = "decode with all logits, tokens/s, beside llama.cpp"
    blank = any("-" in cells for cells in rows)
    title += " (-: see the notes)" if blank else ""
    return f"{title}\n{table(header, rows, right=range(len(header)))}"
