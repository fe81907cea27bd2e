"""What the worker's side says of a model whose layers travel. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from vram_conductor.client.bench_report import median


class Memory(msgspec.Struct, frozen=True):
    """Bytes of an open engine.

    Attributes:
        counted_bytes: window, resident layers, KV cache and activations.
        grown_bytes: by how much the device's use grew, by NVML, beyond the CUDA context; None on
            cpu.
    """

    window_bytes: int
    resident_bytes: int
    kv_bytes: int
    activation_bytes: int
    streamed_bytes: int
    counted_bytes: int
    grown_bytes: int | None

    @property
    def beside_bytes(self) -> int | None:
        """What the device has in use beside what was counted."""
        return None if self.grown_bytes is None else self.grown_bytes - self.counted_bytes


class Decode(msgspec.Struct, frozen=True):
    """So many sequences side by side; ms of every step.

    Attributes:
        step_ms: when the most likely tokens are asked for.
        logits_ms: when all logits are.
        serial_ms: the same, one layer after the other.
        transfer_ms, compute_ms: T and C of a serial pass.
        bound_ms: what the bytes of one pass take at the rate of pinned copies.
        own_bytes: what an engine for just this batch takes on the device.
    """

    batch: int
    step_ms: list[float]
    logits_ms: list[float]
    serial_ms: list[float]
    transfer_ms: float
    compute_ms: float
    bound_ms: float
    own_bytes: int
    memory: Memory

    @property
    def tokens_s(self) -> float:
        return 1e3 * self.batch / median(self.step_ms)

    @property
    def logits_tokens_s(self) -> float:
        return 1e3 * self.batch / median(self.logits_ms)

    @property
    def serial_tokens_s(self) -> float:
        return 1e3 * self.batch / median(self.serial_ms)

    @property
    def bound_share(self) -> float:
        """How much of the PCIe bound was reached, 0 to 1."""
        return self.bound_ms / median(self.step_ms)

    @property
    def compute_bound(self) -> bool:
        """Whether transfers hide behind computation, not the other way round."""
        return self.compute_ms >= self.transfer_ms


class Prefill(msgspec.Struct, frozen=True):
    """One prompt in one pass; ms of every repeat.

    Attributes:
        single_ms: overlapped, from empty slots.
        overlapped_ms: after a pass that has brought the first layers.
        transfer_ms, compute_ms, bound: T, C of the serial pass, and (T + C) / max(T, C).
        serial_spans, overlapped_spans: as the worker says them, for pictures.
    """

    tokens: int
    serial_ms: list[float]
    single_ms: list[float]
    overlapped_ms: list[float]
    transfer_ms: float
    compute_ms: float
    bound: float
    memory: Memory
    serial_spans: list[dict[str, Any]]
    overlapped_spans: list[dict[str, Any]]

    @property
    def speedup(self) -> float:
        return median(self.serial_ms) / median(self.overlapped_ms)


class Agreement(msgspec.Struct, frozen=True):
    """Two engines' logits at the same positions of the same tokens.

    Attributes:
        cosine: of all logits together.
        cosine_least, cosine_median: of one position's.
    """

    cosine: float
    cosine_least: float
    cosine_median: float
    top1_share: float
    positions: int
    greedy_equal: int
    greedy_tokens: int


class Agreements(msgspec.Struct, frozen=True):
    """Ours and llama.cpp's.

    Attributes:
        text: of a real text; without a tokenizer the tokens are drawn.
        same: of the same file.
        copy: llama.cpp's are of a copy in float32, where nothing rounds activations to 8 bits;
            None for a large file.
        without: of the same file, the layer ``without_layer`` left out of ours.
        itself, copy_itself: llama.cpp's with flash attention, and without.
    """

    text: bool
    same: Agreement
    copy: Agreement | None
    copy_itself: Agreement | None
    without: Agreement
    without_layer: int
    itself: Agreement


class Layers(msgspec.Struct, frozen=True):
    """Everything about the pipeline itself.

    Attributes:
        model: of the file; ``random``: its weights are drawn.
        without_resident: batch 1 when every layer travels; None where every layer does anyway.
        phases: seconds of each part.
    """

    setting: dict[str, Any]
    device_name: str
    base_bytes: int
    model: dict[str, Any]
    rates: dict[str, Any]
    agreement: Agreements | None
    prefill: Prefill
    decode: list[Decode]
    without_resident: Decode | None
    phases: dict[str, float]
    notes: list[str]


class BesideRow(msgspec.Struct, frozen=True):
    """llama.cpp with one batch; ``gpu_layers``: -1: all of them."""

    batch: int
    tokens_s: float
    step_ms: list[float]
    gpu_layers: int
    used_bytes: int


class Beside(msgspec.Struct, frozen=True):
    """llama.cpp, one way to run it."""

    rows: list[BesideRow]
    prefill_ms: list[float]
    phases: dict[str, float]
    notes: list[str]


@dataclass
class LayersReport:
    """All of it.

    Attributes:
        beside: way → what llama.cpp reaches: ``partial`` (as many layers on the GPU as fit into
            the memory that the pipeline takes at that batch), ``cpu``, ``all`` (everything on the
            GPU).
    """

    layers: Layers
    beside: dict[str, Beside] = field(default_factory=dict)

    def rate(self, way: str, batch: int) -> float | None:
        """Tokens/s of llama.cpp that way; None where it was not measured."""
        row = self.row(way, batch)
        return None if row is None else row.tokens_s

    def row(self, way: str, batch: int) -> BesideRow | None:
        """Its row."""
        found = self.beside.get(way)
        return next((row for row in found.rows if row.batch == batch), None) if found else None

    def ratios(self, way: str) -> dict[int, float]:
        """Batch → how many times as fast as llama.cpp the pipeline is, all logits wanted."""
        rows = sorted(self.layers.decode, key=lambda row: row.batch)
        rates = ((row, self.rate(way, row.batch)) for row in rows)
        return {row.batch: row.logits_tokens_s / theirs for row, theirs in rates if theirs}
