"""Figures of a model whose layers travel, beside what is wanted of them. *Pure.*"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.client.bench_layers_found import Agreement, Decode, LayersReport
from vram_conductor.client.bench_report import BenchReport, Figure, median, number
from vram_conductor.client.text import size, table

MIB = 1 << 20
COSINE = 0.999
TOP1_PERCENT = 98.0
TOP1_MARGIN = 2.0
"""So much less than llama.cpp agrees with itself is as good: both are samples of one noise."""

GREEDY = 32
BOUND_PERCENT = 85.0
"""Of the PCIe bound, at batch 1 of a model whose pass takes long enough to be measured by it."""

LARGE_BYTES = 1 << 30
PREFILL_SPEEDUP = 1.4
BESIDE_MIB = 64.0
"""On the device beside window, KV cache and activations: the kernels' code."""

WAYS = {"partial": "same memory", "cpu": "CPU", "all": "all on GPU"}


def add_figures(report: BenchReport, found: LayersReport, *, on_cuda: bool) -> None:
    """All rows, the headline and the second table."""
    report.data |= _data(found)
    _agreement(report, found)
    _decode(report, found, on_cuda=on_cuda)
    _prefill(report, found, on_cuda=on_cuda)
    _memory(report, found, on_cuda=on_cuda)
    for way in found.beside:
        _crossing(report, found, way)
    report.headline = headline(found)
    report.more = batches_table(found)


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


def batches_table(found: LayersReport) -> str:
    """One row per batch: tokens/s of everybody."""
    ways = [way for way in WAYS if way in found.beside]
    header = ["batch", "tokens/s", "with logits", "serial", "of the bound", "device memory"]
    header += [f"llama.cpp, {WAYS[way]}" for way in ways]
    rows = []
    for row in found.layers.decode:
        rates = (row.tokens_s, row.logits_tokens_s, row.serial_tokens_s)
        cells = [str(row.batch), *(number(rate, "") for rate in rates)]
        cells += [f"{100 * row.bound_share:.0f} %", size(row.own_bytes)]
        rows.append(cells + [_their_cell(found, way, row) for way in ways])
    return table(header, rows, right=range(len(header)))


def _their_cell(found: LayersReport, way: str, row: Decode) -> str:
    theirs = found.row(way, row.batch)
    if theirs is None:
        return "-"
    layers = f" ({theirs.gpu_layers} layers)" if way == "partial" else ""
    return number(theirs.tokens_s, "") + layers


def _data(found: LayersReport) -> dict[str, Any]:
    plain = msgspec.to_builtins(found.layers)
    prefill = plain["prefill"]
    return {
        "batches": [
            row | {"tokens_s": it.tokens_s, "serial_tokens_s": it.serial_tokens_s}
            for row, it in zip(plain["decode"], found.layers.decode, strict=True)
        ],
        "agreement": plain["agreement"],
        "rates": plain["rates"],
        "base_bytes": plain["base_bytes"],
        "timelines": {name: prefill.pop(f"{name}_spans") for name in ("serial", "overlapped")},
        "prefill": prefill,
        "beside": msgspec.to_builtins(found.beside),
    }


def _agreement(report: BenchReport, found: LayersReport) -> None:
    both = found.layers.agreement
    if both is None:
        return
    same, itself, copy = both.same, both.itself, both.copy
    where = f"{same.positions} positions of {'a text' if both.text else 'drawn tokens'}"
    text = f"logits beside llama.cpp's, {where}: cosine of all"
    note = (
        f"{same.cosine:.5f}, at the worst position {same.cosine_least:.4f}; llama.cpp with flash "
        f"attention beside itself without: {itself.cosine:.5f}, {itself.cosine_least:.4f}"
    )
    report.add(Figure("cosine", text, same.cosine, "", COSINE, ">=", note))
    note = f"llama.cpp beside itself: {100 * itself.top1_share:.1f} %"
    # It rounds activations to 8 bits: two of its own ways to compute choose differently, too.
    top1 = min(TOP1_PERCENT, 100 * itself.top1_share - TOP1_MARGIN)
    share = 100 * same.top1_share
    report.add(Figure("top1", "the same first choice", share, "%", top1, ">=", note))
    _greedy(report, "greedy", same)
    if copy is None:
        return
    text = "the same beside llama.cpp on a copy in float32: cosine, least of all positions"
    note = f"{copy.cosine_least:.6f}: nothing rounds activations there"
    report.add(Figure("copy_cosine", text, copy.cosine_least, "", COSINE, ">=", note))
    share, text = 100 * copy.top1_share, "the same first choice, copy in float32"
    report.add(Figure("copy_top1", text, share, "%", TOP1_PERCENT, ">="))
    _greedy(report, "copy_greedy", copy, ", copy in float32")


def _greedy(report: BenchReport, key: str, it: Agreement, where: str = "") -> None:
    text = f"greedy tokens that are equal from the first on{where}"
    note = f"of {it.greedy_tokens}"
    report.add(Figure(key, text, it.greedy_equal, "", GREEDY, ">=", note))


def _decode(report: BenchReport, found: LayersReport, *, on_cuda: bool) -> None:
    for row in found.layers.decode:
        large = row.memory.streamed_bytes >= LARGE_BYTES
        wanted = BOUND_PERCENT if on_cuda and large and row.batch == 1 else None
        if row.batch == 1:
            text = "decode at batch 1, of what the copy rate allows"
            rate = found.layers.rates["h2d_gb_s"]
            note = f"{size(row.memory.streamed_bytes)} per pass at {rate} GB/s"
            share = 100 * row.bound_share
            report.add(Figure("bound_share", text, share, "%", wanted, ">=", note))
        note = (
            f"{median(row.step_ms):.2f} ms per pass; with all logits "
            f"{median(row.logits_ms):.2f} ms, serial {median(row.serial_ms):.2f} ms"
        )
        text = f"decode at batch {row.batch}"
        report.add(Figure(f"decode_{row.batch}", text, row.tokens_s, "tokens/s", note=note))


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


def _crossing(report: BenchReport, found: LayersReport, way: str) -> None:
    pairs = [
        (row.logits_tokens_s / theirs, row.batch)
        for row in found.layers.decode
        if (theirs := found.rate(way, row.batch))
    ]
    if not pairs:
        return
    first = found.ahead_from(way)
    note = "behind at the largest batch" if first is None else f"ahead from batch {first} on"
    note += ": " + ", ".join(f"{ratio:.2f} x at {batch}" for ratio, batch in pairs)
    text = f"decode with all logits over llama.cpp's, {WAYS[way]}, at batch {pairs[-1][1]}"
    report.add(Figure(f"over_{way}", text, pairs[-1][0], "x", note=note))
