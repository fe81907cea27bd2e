"""The layer pipeline on a real file: its speed, its memory, and whether it computes what it should.

One engine decodes a single sequence in no more memory than that takes, one all larger batches, and
one takes a prompt and is checked. Where time is short, what is most wanted comes first, and time is
kept back for the check, by what the engines before took. What PCIe allows is measured beside: a
pass cannot be shorter than its bytes take at the rate of pinned copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.bench.bench_memory import BenchMemory
from vram_conductor.worker.bench.decoding import STEPS_MIN
from vram_conductor.worker.bench.layers_agreement import Agreements, IncompleteEngine, agree
from vram_conductor.worker.bench.layers_costs import CHECK_SHARE, MARGIN, Costs, cuts
from vram_conductor.worker.bench.layers_rows import Rows
from vram_conductor.worker.bench.layers_setting import LayersSetting
from vram_conductor.worker.bench.llama_steps import Logits
from vram_conductor.worker.bench.llama_text import Said, read_reference
from vram_conductor.worker.bench.phases import Phases
from vram_conductor.worker.bench.random_models import is_random
from vram_conductor.worker.bench.rates import copy_rates
from vram_conductor.worker.pipeline.cuda import load_cupy
from vram_conductor.worker.pipeline.layer_engine import LayerEngine, check_window, spread
from vram_conductor.worker.pipeline.model_file import ModelFile


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
    said = None if reference is None else read_reference(reference)
    with BenchMemory(setting.device) as memory:
        measuring = _Measuring(setting, memory, model["n_vocab"], said)
        rows = measuring.decode("batch 1", setting.alone)
        rows += measuring.decode("larger batches", setting.together)
        without = measuring.without_resident() if setting.resident_layers else None
        agreement, prefill = measuring.check()
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
    def __init__(
        self,
        setting: LayersSetting,
        memory: BenchMemory,
        n_vocab: int,
        reference: tuple[Said, Logits, Logits | None] | None,
    ) -> None:
        self._it, self._memory, self._reference = setting, memory, reference
        self._until = time.monotonic() + setting.seconds
        self.phases = Phases()
        with self.phases.phase("copy rates"):
            self.rates = copy_rates(memory.device)
        self._rows = Rows(setting, memory, self.rates["h2d_gb_s"])
        self._costs = Costs(n_vocab)
        self._begun = False
        self.notes: list[str] = []

    @property
    def _left_s(self) -> float:
        return self._until - time.monotonic()

    @property
    def _check_s(self) -> float:
        """What is kept back for :meth:`check`: of the agreement, as much as fits into a share of
        all the time. Of the time that is left it would become less with every batch, and nothing
        in the end."""
        rounds = 1 + self._it.repeats
        prompt_s = self._costs.open_s + self._costs.prefill_s(self._it.prompt_tokens, rounds)
        most_s = CHECK_SHARE * self._it.seconds
        return MARGIN * prompt_s + self._agreement_s(most_s - MARGIN * prompt_s)

    def _agreement_s(self, left_s: float) -> float:
        """Of as many positions as fit into the time; 0 if too few do."""
        cut = self._cut(left_s)
        return MARGIN * self._costs.agreement_s(*cut) if cut else 0.0

    def _cut(self, left_s: float) -> tuple[int, int] | None:
        """How many positions and greedy tokens fit into the time."""
        if self._reference is None:
            return None
        said, _, _ = self._reference
        every = cuts(len(said.tokens), len(said.greedy))
        fitting = (cut for cut in every if MARGIN * self._costs.agreement_s(*cut) <= left_s)
        return next(fitting, None)

    def _open(
        self, sequences: int, tokens: int, n_ctx: int, *, wanted: int = 0, resident: bool = True
    ) -> IncompleteEngine:
        began = time.monotonic()
        with self.phases.phase("open engines"):
            engine = IncompleteEngine.open(
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
        self._costs.open_s = time.monotonic() - began
        return engine

    def decode(self, phase: str, batches: Sequence[int]) -> list[dict[str, Any]]:
        """One engine for all of these batches, or for those that there are memory and time for;
        the first of all is measured however little time there is."""
        if self._begun and self._left_s < self._check_s:
            self._leave_out(batches, "no time was left")
            return []
        most, engine = self._open_largest(batches)
        if engine is None:
            return []
        rows: list[dict[str, Any]] = []
        left_out: list[int] = []
        with engine, self.phases.phase(phase):
            for batch in (batch for batch in batches if batch <= most):
                need_s = self._costs.row_s(batch, 1 + STEPS_MIN) + self._check_s
                if self._begun and self._left_s < need_s:
                    left_out.append(batch)
                else:
                    rows.append(self._row(engine, batch, most))
        self._leave_out(left_out, "no time was left")
        return rows

    def _open_largest(self, batches: Sequence[int]) -> tuple[int, LayerEngine | None]:
        """For the largest batch that there is memory for, and which it is: what was measured
        before is worth more than one that there is none for."""
        left_out: list[int] = []
        why = ""
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

    def _row(self, engine: LayerEngine, batch: int, most: int) -> dict[str, Any]:
        self._begun = True
        # A round that is begun is ended: one of them is not counted on.
        round_s = self._costs.row_s(batch, 1 + STEPS_MIN)
        row = self._rows.decode(engine, batch, most, self._left_s - self._check_s - round_s)
        self._costs.add_pass(batch, statistics.median(row["logits_ms"]) / 1e3)
        return row

    def without_resident(self) -> dict[str, Any] | None:
        """Batch 1, every layer travelling."""
        if self._left_s < self._costs.open_s + self._check_s:
            return None
        with (
            self._open(1, 1, self._it.n_ctx, resident=False) as engine,
            self.phases.phase("batch 1 without resident layers"),
        ):
            return self._rows.decode(engine, 1, 1, self._left_s - self._check_s)

    def check(self) -> tuple[Agreements | None, dict[str, Any]]:
        """The prefill, and our logits beside llama.cpp's as far as there is time for them."""
        prompt = self._it.prompt_tokens
        if self._reference is None:
            with self._open(1, prompt, prompt) as engine:
                return None, self._prefill(engine)
        said, _, _ = self._reference
        count = len(said.tokens)
        n_ctx = max(prompt, count + len(said.greedy))
        with self._open(1, max(prompt, count), n_ctx, wanted=count) as engine:
            prefill = self._prefill(engine)
            engine.reset()
            return self._agree(engine), prefill

    def _agree(self, engine: IncompleteEngine) -> Agreements | None:
        assert self._reference is not None
        said, theirs, copy = self._reference
        every = len(said.tokens), len(said.greedy)
        cut = self._cut(self._left_s)
        if cut is None:
            need_s, left_s = self._costs.agreement_s(*every), max(0.0, self._left_s)
            self.notes.append(
                "no time was left for the logits beside llama.cpp's: all of them need about "
                f"{need_s:.0f} s, {left_s:.0f} s were left"
            )
            return None
        if cut != every:
            self.notes.append(
                f"time was left for {cut[0]} of {every[0]} positions and {cut[1]} of {every[1]} "
                "greedy tokens beside llama.cpp's"
            )
        positions, _ = cut
        with self.phases.phase("agreement"):
            part = None if copy is None else copy[:positions]
            return agree(engine, said.first(*cut), theirs[:positions], part)

    def _prefill(self, engine: LayerEngine) -> dict[str, Any]:
        least_s = self._costs.prefill_s(self._it.prompt_tokens, 2)
        until = self._until - self._agreement_s(self._left_s - least_s)
        with self.phases.phase("prefill"):
            found = self._rows.prefill(engine, until)
        self._costs.add_pass(found["tokens"], statistics.median(found["serial_ms"]) / 1e3)
        return found
