"""The layer pipeline on a real file: its speed, its memory, and whether it computes what it should.

One engine is checked and takes a prompt, one decodes a single sequence in no more memory than that
takes, and one all larger batches. What PCIe allows is measured beside: a pass cannot be shorter
than its bytes take at the rate of pinned copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.bench.bench_memory import BenchMemory
from vram_conductor.worker.bench.decoding import Step, decode_ms, random_tokens, step_ms
from vram_conductor.worker.bench.layers_agreement import Agreements, IncompleteEngine, agree
from vram_conductor.worker.bench.layers_setting import LayersSetting
from vram_conductor.worker.bench.llama_text import read_reference
from vram_conductor.worker.bench.phases import Phases
from vram_conductor.worker.bench.random_models import is_random
from vram_conductor.worker.bench.rates import copy_rates
from vram_conductor.worker.pipeline.cuda import load_cupy
from vram_conductor.worker.pipeline.forward import Batch
from vram_conductor.worker.pipeline.layer_engine import LayerEngine, check_window, spread
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.schedule import bound
from vram_conductor.worker.pipeline.streams import Span

STEP_S = 0.6
"""Each way to decode a batch is measured for about so long."""


@dataclass(frozen=True)
class LayersFound:
    """What the client is told.

    Attributes:
        device_name: of the GPU; empty on cpu.
        base_bytes: of the CUDA context, which is in no other figure.
        model: see :func:`describe`.
        rates: see ``rates.copy_rates``.
        agreement: None without a reference.
        prefill: ``serial_ms``, ``single_ms``, ``overlapped_ms`` of every repeat; T, C and bound;
            spans; memory.
        decode: one row per batch, in rising order: ms of every step, when the most likely tokens
            are asked for (``step_ms``) or all logits (``logits_ms``), and serial, with all logits;
            T and C of a serial pass.
        without_resident: the row of batch 1 when no layer is resident; None where none is anyway.
        phases: seconds of each part.
        notes: what was left out, and why.
    """

    setting: LayersSetting
    device_name: str
    base_bytes: int
    model: dict[str, Any]
    rates: dict[str, Any]
    agreement: Agreements | None
    prefill: dict[str, Any]
    decode: list[dict[str, Any]]
    without_resident: dict[str, Any] | None
    phases: dict[str, float]
    notes: list[str]


def describe(setting: LayersSetting) -> dict[str, Any]:
    """What the file is, or why it cannot be measured like this; nothing is allocated.

    Raises:
        InvalidArgument: ``bad_window``, ``bad_resident``.
        FailedPrecondition: ``cupy_missing``.
        ConductorError: as ``ModelFile.open``.
    """
    check_window(setting.window_layers)
    if setting.device.startswith("cuda"):
        load_cupy()
    with ModelFile.open(setting.path) as model:
        it = model.hyperparameters
        spread(it.n_layer, setting.resident_layers)
        return {
            "arch": it.arch,
            "n_layer": it.n_layer,
            "n_embd": it.n_embd,
            "n_vocab": it.n_vocab,
            "n_ctx_train": it.n_ctx_train,
            "units": len(model.units),
            "layer_bytes": model.largest_bytes,
            "pass_bytes": sum(unit.n_bytes for unit in model.units),
            "file_bytes": model.gguf.n_bytes,
            "random": is_random(setting.path),
            "types": sorted({tensor.type.name for tensor in model.gguf.tensors.values()}),
        }


def measure_layers(setting: LayersSetting, reference: Path | None = None) -> LayersFound:
    """Everything about the pipeline itself.

    Args:
        reference: a folder with what llama.cpp said (``llama_text.write_reference``).

    Raises:
        ConductorError: as ``LayerEngine.open`` and its steps.
    """
    model = describe(setting)
    with BenchMemory(setting.device) as memory:
        measuring = _Measuring(setting, memory, copy_rates(memory.device))
        # What is most wanted comes first: the time may be short.
        agreement, prefill = measuring.check(reference)
        rows = measuring.decode("batch 1", setting.alone)
        without = measuring.without_resident() if setting.resident_layers else None
        rows += measuring.decode("larger batches", setting.together)
        return LayersFound(
            setting=setting,
            device_name=memory.name,
            base_bytes=memory.base_bytes,
            model=model,
            rates=measuring.rates,
            agreement=agreement,
            prefill=prefill,
            decode=sorted(rows, key=lambda row: int(row["batch"])),
            without_resident=without,
            phases=measuring.phases.seconds,
            notes=measuring.notes,
        )


class _Measuring:
    def __init__(self, setting: LayersSetting, memory: BenchMemory, rates: dict[str, Any]) -> None:
        self._it, self._memory, self.rates = setting, memory, rates
        self._until = time.monotonic() + setting.seconds
        self.phases = Phases()
        self.notes: list[str] = []

    def _open(
        self, sequences: int, tokens: int, n_ctx: int, *, wanted: int = 0, resident: bool = True
    ) -> IncompleteEngine:
        with self.phases.phase("open engines"):
            return IncompleteEngine.open(
                self._it.path,
                self._memory.device,
                window_layers=self._it.window_layers,
                resident_layers=self._it.resident_layers if resident else 0,
                n_ctx=n_ctx,
                sequences=sequences,
                tokens_max=tokens,
                wanted_max=wanted or sequences,
                timed=True,
            )

    def check(self, folder: Path | None) -> tuple[Agreements | None, dict[str, Any]]:
        """Our logits beside llama.cpp's, and the prefill."""
        prompt, agreement = self._it.prompt_tokens, None
        if folder is None:
            with self._open(1, prompt, prompt) as engine:
                return None, self._prefill(engine)
        said, theirs, copy = read_reference(folder)
        count = len(said.tokens)
        n_ctx = max(prompt, count + len(said.greedy))
        with self._open(1, max(prompt, count), n_ctx, wanted=count) as engine:
            with self.phases.phase("agreement"):
                agreement = agree(engine, said, theirs, copy)
            return agreement, self._prefill(engine)

    def _prefill(self, engine: LayerEngine) -> dict[str, Any]:
        """One prompt in one pass, on the same memory: serial, overlapped from empty slots, and
        overlapped after a pass that has brought the first layers. In turn: clocks change."""
        it = self._it
        took: dict[str, list[float]] = {"serial": [], "single": [], "overlapped": []}
        spans: dict[str, list[Span]] = {}
        alone: list[tuple[float, float]] = []
        batch = Batch.of(random_tokens(it.prompt_tokens, engine.model.hyperparameters.n_vocab), 0)
        steps = {"serial": engine.step_serial, "single": engine.step, "overlapped": engine.step}
        engine.spans()
        with self.phases.phase("prefill"):
            for at in range(1 + it.repeats):
                if at and time.monotonic() > self._until:
                    break
                for name, step in steps.items():
                    took[name].append(step_ms(step, batch))
                    spans[name] = _last_pass(engine.spans())
                alone.append(_each_stream_ms(spans["serial"]))
        # The first one is a warm-up, where there was time for others.
        transfer_ms, compute_ms = map(statistics.median, zip(*(alone[1:] or alone), strict=True))
        return {
            "tokens": it.prompt_tokens,
            **{f"{name}_ms": values[1:] or values for name, values in took.items()},
            "serial_spans": spans["serial"],
            "overlapped_spans": spans["overlapped"],
            "transfer_ms": transfer_ms,
            "compute_ms": compute_ms,
            "bound": bound(transfer_ms, compute_ms),
            "memory": self._bytes(engine),
        }

    def decode(self, phase: str, batches: Sequence[int]) -> list[dict[str, Any]]:
        """One engine for all of these batches, or for those that there is memory for."""
        if time.monotonic() > self._until:
            self._leave_out(batches, "no time was left")
            return []
        most, engine = self._open_largest(batches)
        if engine is None:
            return []
        rows, left_out = [], []
        with engine, self.phases.phase(phase):
            for batch in (batch for batch in batches if batch <= most):
                if time.monotonic() > self._until:
                    left_out.append(batch)
                else:
                    rows.append(self._row(engine, batch, most))
        self._leave_out(left_out, "no time was left")
        return rows

    def _open_largest(self, batches: Sequence[int]) -> tuple[int, LayerEngine | None]:
        """For the largest batch that there is memory for, and which it is: what was measured
        before is worth more than one that there is none for."""
        left_out, why = [], ""
        try:
            for batch in sorted(batches, reverse=True):
                try:
                    return batch, self._open(batch, batch, self._it.n_ctx)
                except ResourceExhausted as error:
                    left_out.append(batch)
                    why = f": {error.info.message}"
            return 0, None
        finally:
            self._leave_out(left_out, "there was no memory", why)

    def _leave_out(self, batches: Sequence[int], what: str, why: str = "") -> None:
        if batches:
            listed = ", ".join(map(str, sorted(batches)))
            self.notes.append(f"{what} for batch {listed}{why}")

    def without_resident(self) -> dict[str, Any] | None:
        """Batch 1, every layer travelling."""
        if time.monotonic() > self._until:
            return None
        with (
            self._open(1, 1, self._it.n_ctx, resident=False) as engine,
            self.phases.phase("batch 1 without resident layers"),
        ):
            return self._row(engine, 1, 1)

    def _row(self, engine: LayerEngine, batch: int, most: int) -> dict[str, Any]:
        seconds = max(0.0, min(STEP_S, self._until - time.monotonic()))
        n_vocab = engine.model.hyperparameters.n_vocab

        def timed(step: Step) -> list[float]:
            engine.reset()
            engine.spans()
            return decode_ms(step, batch, n_vocab, steps=self._it.steps, seconds=seconds)

        overlapped, logits, serial = map(timed, (engine.step_best, engine.step, engine.step_serial))
        transfer_ms, compute_ms = _each_stream_ms(_last_pass(engine.spans()))
        bound_ms = engine.figures.streamed_bytes / self.rates["h2d_gb_s"] / 1e6
        memory = self._bytes(engine)
        # An engine for just this batch would have a smaller KV cache and smaller activations.
        per_batch = (memory["kv_bytes"] + memory["activation_bytes"]) * batch // most
        beside = max(0, (memory["grown_bytes"] or 0) - memory["counted_bytes"])
        return {
            "batch": batch,
            "step_ms": overlapped,
            "logits_ms": logits,
            "serial_ms": serial,
            "transfer_ms": transfer_ms,
            "compute_ms": compute_ms,
            "bound_ms": bound_ms,
            "own_bytes": memory["window_bytes"] + memory["resident_bytes"] + per_batch + beside,
            "memory": memory,
        }

    def _bytes(self, engine: LayerEngine) -> dict[str, Any]:
        figures = engine.figures
        return asdict(figures) | {
            "counted_bytes": figures.device_bytes,
            "grown_bytes": self._memory.grown_bytes(),
        }


def _last_pass(spans: Sequence[Span]) -> list[Span]:
    """Of the last whole pass, from 0 ms on."""
    last = max((span.at_pass for span in spans if span.stream == "compute"), default=0)
    # Serial passes all have the number 0.
    found = {(span.stream, span.unit): span for span in spans if span.at_pass == last}
    begin_ms = min((span.start_ms for span in found.values()), default=0.0)
    return [
        Span(span.stream, span.unit, span.start_ms - begin_ms, span.end_ms - begin_ms)
        for span in found.values()
    ]


def _each_stream_ms(spans: Sequence[Span]) -> tuple[float, float]:
    """Transfers, computations."""
    sums = {"transfer": 0.0, "compute": 0.0}
    for span in spans:
        sums[span.stream] += span.ms
    return sums["transfer"], sums["compute"]
