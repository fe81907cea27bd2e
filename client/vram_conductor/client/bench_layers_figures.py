"""Figures of a model whose layers travel, beside what is wanted of them. *Pure.*"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from vram_conductor.client.bench_layers_beside import WAYS, add_beside
from vram_conductor.client.bench_layers_found import Agreement, Agreements, LayersReport
from vram_conductor.client.bench_report import BenchReport, Figure, median, number
from vram_conductor.client.text import plural, size

MIB = 1 << 20
COSINE = 0.999
COSINE_WITHOUT = 0.99
"""At most, with a layer left out: otherwise the comparison could not fail."""

COSINE_DIGITS = 5
TOP1_PERCENT = 98.0
GREEDY = 32
BOUND_PERCENT = 85.0
"""Of the PCIe bound, at batch 1 of a model whose pass takes long enough to be measured by it."""

LARGE_BYTES = 1 << 30
PREFILL_SPEEDUP = 1.4
BESIDE_MIB = 64.0
"""On the device beside window, KV cache and activations: the kernels' code."""


def add_figures(report: BenchReport, found: LayersReport, *, on_cuda: bool) -> None:
    """All rows, the headline and the second table."""
    report.data |= _data(found)
    _agreement(report, found)
    _decode(report, found, on_cuda=on_cuda)
    _prefill(report, found, on_cuda=on_cuda)
    _memory(report, found, on_cuda=on_cuda)
    add_beside(report, found)
    report.headline = headline(found)


def headline(found: LayersReport) -> str:
    """One line about the prefill, as Part 1 of the bench says it, and the decode."""
    prefill = found.layers.prefill
    serial, overlapped = median(prefill.serial_ms), median(prefill.overlapped_ms)
    text = (
        f"HEADLINE: prefill of {prefill.tokens} tokens: serial={serial:.2f} ms, "
        f"overlapped={overlapped:.2f} ms, savings={100 * (1 - overlapped / serial):.1f} %, "
        f"speedup={prefill.speedup:.3f}x"
    )
    first = next(iter(found.layers.decode), None)
    if first is not None:
        text += (
            f"; decode at batch {first.batch}: {first.tokens_s:.2f} tokens/s, "
            f"{100 * first.bound_share:.0f} % of what the copy rate allows"
        )
    return text


def _data(found: LayersReport) -> dict[str, Any]:
    plain = msgspec.to_builtins(found.layers)
    prefill = plain["prefill"]
    return {
        "batches": [
            row
            | {
                "tokens_s": it.tokens_s,
                "logits_tokens_s": it.logits_tokens_s,
                "serial_tokens_s": it.serial_tokens_s,
            }
            for row, it in zip(plain["decode"], found.layers.decode, strict=True)
        ],
        "agreement": plain["agreement"],
        "rates": plain["rates"],
        "base_bytes": plain["base_bytes"],
        "timelines": {name: prefill.pop(f"{name}_spans") for name in ("serial", "overlapped")},
        "prefill": prefill,
        "without_resident": plain["without_resident"],
        "beside": msgspec.to_builtins(found.beside),
    }


def _agreement(report: BenchReport, found: LayersReport) -> None:
    both = found.layers.agreement
    if both is None:
        return
    same, random = both.same, bool(found.layers.model["random"])
    where = f"{same.positions} positions of {'a text' if both.text else 'drawn tokens'}"
    text = f"logits beside llama.cpp's, {where}: cosine"
    note = f"worst position {same.cosine_least:.5f}; llama.cpp with itself {_cosines(both.itself)}"
    _cosine(report, "cosine", text, same.cosine, note)
    _control(report, both)
    itself, copy = both.itself, both.copy
    # Two ways of llama.cpp's own to round differ in what they choose, too: of random weights none
    # is the right one, so there is nothing to miss.
    note = f"llama.cpp with itself {100 * itself.top1_share:.1f} %"
    note += "" if copy is None else f"; on a copy in float32 ours {100 * copy.top1_share:.1f} %"
    wanted = None if random else TOP1_PERCENT
    share = 100 * same.top1_share
    report.add(Figure("top1", "the same first choice", share, "%", wanted, ">=", note))
    # It had said more of them where ours had little time.
    note = f"; llama.cpp with itself {min(itself.greedy_equal, same.greedy_tokens)}"
    note += "" if copy is None else f"; on a copy in float32 ours {copy.greedy_equal}"
    _greedy(report, "greedy", same, note, wanted=not random)
    if copy is None:
        return
    text = "beside llama.cpp on a copy in float32: cosine, worst position"
    note = "nothing is rounded to 8 bits there"
    if both.copy_itself is not None:
        note += f"; llama.cpp with itself {both.copy_itself.cosine_least:.5f}"
    _cosine(report, "copy_cosine", text, copy.cosine_least, note)
    share, text = 100 * copy.top1_share, "the same first choice, copy in float32"
    report.add(Figure("copy_top1", text, share, "%", TOP1_PERCENT, ">="))
    _greedy(report, "copy_greedy", copy, ", copy in float32", wanted=True)


def _control(report: BenchReport, both: Agreements) -> None:
    text = f"the same with layer {both.without_layer} left out: cosine"
    value = both.without.cosine
    note = "so a wrong layer shows"
    if value > COSINE_WITHOUT:
        note = "this file's layers hardly matter: its cosines say little"
    figure = Figure("without", text, value, "", COSINE_WITHOUT, "<=", note, digits=COSINE_DIGITS)
    report.add(figure)


def _cosine(report: BenchReport, key: str, text: str, value: float, note: str) -> None:
    report.add(Figure(key, text, value, "", COSINE, ">=", note, digits=COSINE_DIGITS))


def _cosines(it: Agreement) -> str:
    return f"{it.cosine:.5f}, {it.cosine_least:.5f}"


def _greedy(report: BenchReport, key: str, it: Agreement, more: str = "", *, wanted: bool) -> None:
    where = ", copy in float32" if key.startswith("copy") else ""
    text = f"greedy tokens that are equal from the first on{where}"
    note = f"of {it.greedy_tokens}{'' if where else more}"
    # Where there was little time, fewer were compared.
    limit = min(GREEDY, it.greedy_tokens) if wanted else None
    report.add(Figure(key, text, it.greedy_equal, "", limit, ">=", note))


def _decode(report: BenchReport, found: LayersReport, *, on_cuda: bool) -> None:
    rows = found.layers.decode
    for row in rows:
        if row.batch == 1:
            large = row.memory.streamed_bytes >= LARGE_BYTES
            wanted = BOUND_PERCENT if on_cuda and large else None
            text = "decode at batch 1, of what the copy rate allows"
            rate = found.layers.rates["h2d_gb_s"]
            note = f"{size(row.memory.streamed_bytes)} per pass at {rate:.1f} GB/s"
            share = 100 * row.bound_share
            report.add(Figure("bound_share", text, share, "%", wanted, ">=", note))
    # The others are in a table of their own.
    for row in rows if len(rows) < 2 else (rows[0], rows[-1]):
        note = (
            f"{median(row.step_ms):.2f} ms per pass; with all logits "
            f"{median(row.logits_ms):.2f} ms, serial {median(row.serial_ms):.2f} ms"
        )
        text = f"decode at batch {row.batch}"
        report.add(Figure(f"decode_{row.batch}", text, row.tokens_s, "tokens/s", note=note))
    if len(rows) > 1:
        _growth(report, found)
    _resident(report, found)


def _growth(report: BenchReport, found: LayersReport) -> None:
    """Larger batches share the same transfers, until those are hidden entirely."""
    rows = found.layers.decode
    first = next((row for row in rows if row.compute_bound), None)
    at = rows[-1] if first is None else first
    text = "batch from which on it is compute-bound (C >= T)"
    note = (
        f"C {at.compute_ms:.1f} ms, T {at.transfer_ms:.1f} ms at {at.batch}; "
        f"{number(at.tokens_s, '')} tokens/s there"
    )
    if first is None:
        note = f"none up to {at.batch}: {note}"
    report.add(Figure("compute_bound", text, first.batch if first else None, note=note))
    upto = rows[: 1 + rows.index(at)]
    pairs = list(pairwise(upto))
    if pairs:
        growth, batch = min((b.tokens_s / a.tokens_s, b.batch) for a, b in pairs)
        text = "tokens/s over those of the next smaller batch, up to there, at least"
        report.add(Figure("growth", text, growth, "x", 1.0, ">=", f"at batch {batch}"))


def _resident(report: BenchReport, found: LayersReport) -> None:
    """What the layers that stay on the device are worth."""
    without = found.layers.without_resident
    one = next((row for row in found.layers.decode if row.batch == 1), None)
    if without is None or one is None:
        return
    layers = plural(int(found.layers.setting["resident_layers"]), "resident layer")
    before, after = median(without.step_ms), median(one.step_ms)
    note = f"{after:.2f} ms, not {before:.2f} ms, for {size(one.memory.resident_bytes)} more"
    text = f"decode at batch 1 with {layers} over none"
    report.add(Figure("resident", text, before / after, "x", note=note))


def _prefill(report: BenchReport, found: LayersReport, *, on_cuda: bool) -> None:
    prefill = found.layers.prefill
    note = (
        f"serial {median(prefill.serial_ms):.1f} ms, overlapped "
        f"{median(prefill.overlapped_ms):.1f} ms (from empty slots "
        f"{median(prefill.single_ms):.1f} ms); T {prefill.transfer_ms:.1f} ms, "
        f"C {prefill.compute_ms:.1f} ms, bound {prefill.bound:.2f} x"
    )
    text = f"prefill of {prefill.tokens} tokens, overlapped over serial"
    wanted = PREFILL_SPEEDUP if on_cuda else None
    report.add(Figure("prefill", text, prefill.speedup, "x", wanted, ">=", note))
    ours = 1e3 * prefill.tokens / median(prefill.overlapped_ms)
    beside = {way: it.prefill_ms for way, it in found.beside.items() if it.prefill_ms}
    others = [
        f"llama.cpp, {WAYS[way]}: {number(1e3 * prefill.tokens / median(took), '')}"
        for way, took in beside.items()
    ]
    text = f"prefill of {prefill.tokens} tokens"
    report.add(Figure("prefill_rate", text, ours, "tokens/s", note="; ".join(others)))


def _memory(report: BenchReport, found: LayersReport, *, on_cuda: bool) -> None:
    engines = {"prefill": found.layers.prefill.memory}
    engines |= {f"batch {row.batch}": row.memory for row in found.layers.decode}
    name, memory = max(engines.items(), key=lambda item: item[1].beside_bytes or 0)
    note = (
        f"{name}: window {size(memory.window_bytes)}, resident {size(memory.resident_bytes)}, KV "
        f"{size(memory.kv_bytes)}, activations {size(memory.activation_bytes)}"
    )
    first = next(iter(found.layers.decode), None)
    if first is not None:
        total = size(found.layers.model["pass_bytes"])
        text, value = "device memory at the smallest batch", first.memory.counted_bytes / MIB
        report.add(Figure("memory", text, value, "MiB", note=f"the model's layers: {total}"))
    if not on_cuda:
        return
    beside = memory.beside_bytes
    value_or_none = None if beside is None else beside / MIB
    text = "in use by NVML beside window, resident layers, KV and activations"
    report.add(Figure("beside", text, value_or_none, "MiB", BESIDE_MIB, "<=", note))
