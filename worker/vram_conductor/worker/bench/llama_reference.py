"""llama.cpp on the same file, in a process of its own: what the layer pipeline stands beside.

On a GPU it may use as much memory as the pipeline does at the same batch; so many layers go there
as fit into that (``n_gpu_layers``), the others stay on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.bench.bench_memory import BenchMemory
from vram_conductor.worker.bench.decoding import decode_ms, random_tokens, step_ms
from vram_conductor.worker.bench.layers_setting import STEPS
from vram_conductor.worker.bench.llama_steps import computer, load_bare
from vram_conductor.worker.bench.phases import Phases
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.pipeline.forward import Batch
from vram_conductor.worker.pipeline.model_file import ModelFile

ALL_LAYERS = -1
PREFILLS = 3
FIT_TRIES = 4
STEP_S = 1.0
"""Each batch is measured for about so long, and so is the prefill."""

MIB = 1 << 20


def measure_reference(
    path: str,
    device: str,
    threads: int,
    batches: Sequence[tuple[int, int]],
    *,
    n_ctx: int,
    prompt_tokens: int,
    seconds: float,
    partial: bool,
) -> dict[str, Any]:
    """Decode and prefill as fast as llama.cpp does them.

    Args:
        batches: (sequences, bytes that it may use on the GPU), those first that are wanted most;
            bytes only count with ``partial``.
        partial: on cuda, only as many layers on the GPU as fit; otherwise all.

    Returns:
        ``rows``: batch, tokens_s, step_ms, gpu_layers, used_bytes; ``prefill_ms`` with the first
        batch's layers; ``phases``: seconds; ``notes``: what was left out, and why.

    Raises:
        FailedPrecondition: ``no_library``, ``no_device``.
        ConductorError: what llama.cpp says to the file.
    """
    with _Reference(path, device, threads, n_ctx) as reference:
        return reference.measure(batches, prompt_tokens, seconds, partial=partial)


class _Reference:
    def __init__(self, path: str, device: str, threads: int, n_ctx: int) -> None:
        cuda = device.startswith("cuda")
        self._path, self._n_ctx = path, n_ctx
        self._memory = BenchMemory(device, _llama_context)
        self._bare = load_bare()
        self._options = EngineOptions(device_kind="cuda" if cuda else "cpu", threads=threads)
        self._model: Any = None
        self._gpu_layers = 0
        self._beside_bytes: dict[int, int] = {0: 0}
        self._phases = Phases()
        self._notes: list[str] = []
        with ModelFile.open(path) as model:
            it = model.hyperparameters
            self._n_layer, self._layer_bytes = it.n_layer, model.largest_bytes
        cells = -(-n_ctx // self._bare.CELLS_MULTIPLE) * self._bare.CELLS_MULTIPLE
        # Keys and values of one layer and sequence, in float16.
        self._kv_bytes: int = 2 * 2 * it.kv_width * cells

    def measure(
        self,
        batches: Sequence[tuple[int, int]],
        prompt_tokens: int,
        seconds: float,
        *,
        partial: bool,
    ) -> dict[str, Any]:
        until = time.monotonic() + seconds
        rows: list[dict[str, Any]] = []
        prefill: list[float] = []
        late: list[int] = []
        most = self._bare.sequences_max()
        for sequences, room_bytes in batches:
            if sequences > most:
                self._notes.append(f"llama.cpp has at most {most} sequences, not {sequences}")
            elif time.monotonic() > until:
                late.append(sequences)
            elif row := self._row(sequences, room_bytes if partial else None, until):
                rows.append(row)
                prefill = prefill or self._prefill(prompt_tokens)
        if late:
            listed = ", ".join(map(str, sorted(late)))
            self._notes.append(f"no time was left for batch {listed}")
        rows.sort(key=lambda row: int(row["batch"]))
        phases = self._phases.seconds
        return {"rows": rows, "prefill_ms": prefill, "phases": phases, "notes": self._notes}

    def _row(self, sequences: int, limit: int | None, until: float) -> dict[str, Any] | None:
        """Loads the model as often as it takes to fit."""
        layers, each = ALL_LAYERS, self._each(sequences)
        if limit is not None:
            # A smaller batch took no more beside its layers: what fits is not guessed too low.
            known = max(batch for batch in self._beside_bytes if batch <= sequences)
            fit = max(0, limit - self._beside_bytes[known]) // each
            layers = min(self._n_layer + 1, fit)
        used = 0
        for _ in range(FIT_TRIES):
            try:
                self._load_with(layers)
                took, used = self._decode(sequences, limit, until)
            except ConductorError as error:
                self._notes.append(f"batch {sequences}: {error.info.message}")
                return None
            self._beside_bytes[sequences] = max(0, used - max(0, layers) * each)
            if took:
                return {
                    "batch": sequences,
                    "tokens_s": 1e3 * sequences / statistics.median(took),
                    "step_ms": took,
                    "gpu_layers": self._gpu_layers,
                    "used_bytes": used,
                }
            assert limit is not None
            if layers == 0 or time.monotonic() > until:
                break
            layers = max(0, layers - max(1, -(-(used - limit) // each)))
        self._notes.append(
            f"batch {sequences}: with {self._gpu_layers} layers on the GPU llama.cpp uses "
            f"{used / MIB:.0f} MiB there, and the pipeline {(limit or 0) / MIB:.0f} MiB"
        )
        return None

    def _each(self, sequences: int) -> int:
        """Bytes of a layer on the GPU, with its KV."""
        return self._layer_bytes + sequences * self._kv_bytes

    def _load_with(self, layers: int) -> None:
        if self._model is not None and self._gpu_layers == layers:
            return
        with self._phases.phase("loads"):
            self._close()
            self._model = self._bare.BareModel(self._path, self._options, layers)
        self._gpu_layers = layers

    def _decode(self, sequences: int, limit: int | None, until: float) -> tuple[list[float], int]:
        """Milliseconds of every step, [] if it takes more than the limit; bytes on the GPU."""
        room = self._bare.Room(self._n_ctx, sequences, sequences, sequences)
        seconds = max(0.0, min(STEP_S, until - time.monotonic()))
        with self._phases.phase("decode"), self._model.open(room) as context:
            took: list[float] = []
            if not self._over(limit):
                step, n_vocab = computer(context), self._model.n_vocab
                took = decode_ms(step, sequences, n_vocab, steps=STEPS, seconds=seconds)
            return [] if self._over(limit) else took, self._memory.grown_bytes() or 0

    def _over(self, limit: int | None) -> bool:
        return limit is not None and (self._memory.grown_bytes() or 0) > limit

    def _prefill(self, count: int) -> list[float]:
        """Where one takes long, it is the only one: the model has computed before."""
        room = self._bare.Room(count, tokens=count)
        with self._phases.phase("prefill"), self._model.open(room) as context:
            batch = Batch.of(random_tokens(count, self._model.n_vocab), 0)
            took: list[float] = []
            while len(took) <= PREFILLS and sum(took) < 1e3 * STEP_S:
                context.clear()
                took.append(step_ms(computer(context), batch))
            return took[1:] or took

    def _close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None

    def __enter__(self) -> _Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self._memory.__exit__(*error)


def _llama_context() -> object:
    load_bare()
    from vram_conductor.worker.llama.device import CudaDevice

    return CudaDevice()
