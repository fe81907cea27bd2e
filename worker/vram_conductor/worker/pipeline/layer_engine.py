"""A model whose layers are streamed, as an engine: a batch of tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.worker.pipeline.assembly import Assembly, Plan, assemble_host
from vram_conductor.worker.pipeline.forward import Batch, Capacity, Forward
from vram_conductor.worker.pipeline.kv_cache import KvCache
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.runner import Pipeline
from vram_conductor.worker.pipeline.schedule import Schedule
from vram_conductor.worker.pipeline.streams import Span

_Result = TypeVar("_Result")

WINDOW_LAYERS_MIN = 2
WINDOW_LAYERS_MAX = 4


@dataclass(frozen=True)
class Figures:
    """Bytes of an open engine.

    Attributes:
        window_bytes: slots.
        resident_bytes: units that stay.
        kv_bytes: the KV cache.
        activation_bytes: everything else on the device.
        streamed_bytes: that travel in one pass.
    """

    window_bytes: int
    resident_bytes: int
    kv_bytes: int
    activation_bytes: int
    streamed_bytes: int

    @property
    def device_bytes(self) -> int:
        """All that it takes where it computes."""
        return self.window_bytes + self.resident_bytes + self.kv_bytes + self.activation_bytes


class LayerEngine:
    """One open model. One thread uses it.

    A step that fails (but for ``close``) leaves it usable: what the batch's sequences held before
    the batch is still there, and so are all other sequences. A step that is interrupted closes it.

    Attributes:
        model: dimensions and units.
        capacity: the limits of a batch.
        figures: bytes.
    """

    def __init__(self, plan: Plan, assembly: Assembly) -> None:
        self.model = plan.model
        self.capacity = plan.capacity
        self.figures = _figures(plan, assembly)
        self._assembly: Assembly | None = assembly
        schedule = Schedule(len(plan.model.units), plan.window_layers, plan.resident)
        self._pipeline = Pipeline(assembly.streams, schedule)
        self._cache = KvCache(plan.capacity, plan.model.hyperparameters.n_vocab)

    @classmethod
    def open(
        cls,
        path: str | Path,
        device: str = "cpu",
        *,
        window_layers: int = WINDOW_LAYERS_MIN,
        resident_layers: int = 0,
        n_ctx: int = 4096,
        sequences: int = 1,
        tokens_max: int = 512,
        wanted_max: int | None = None,
        timed: bool = False,
    ) -> Self:
        """Open a model on a device.

        Args:
            device: ``cpu`` or ``cuda:N``.
            window_layers: 2 to 4 slots that layers travel into.
            resident_layers: so many stay on the device, spread evenly.
            n_ctx, sequences, tokens_max, wanted_max: see :class:`Capacity`; logits of one token
                per sequence, unless ``wanted_max`` says otherwise.
            timed: keep when everything ran, for :meth:`spans`.

        Raises:
            InvalidArgument: ``bad_window``, ``bad_resident``, ``bad_capacity``.
            ConductorError: what :meth:`ModelFile.open` finds, and what the device lacks.
        """
        capacity = Capacity(
            n_ctx, sequences, tokens_max, sequences if wanted_max is None else wanted_max
        )
        check_window(window_layers)
        assemble = _assembler(device)
        model = ModelFile.open(path)
        try:
            resident = spread(model.hyperparameters.n_layer, resident_layers)
            plan = Plan(model, capacity, window_layers, resident, timed)
            return cls(plan, assemble(plan))
        except BaseException:
            model.close()
            raise

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Compute a batch while the layers travel; the first layers of the next step follow them.

        Returns:
            Logits of the wanted tokens, (len(batch.wanted), n_vocab).

        Raises:
            InvalidArgument, OutOfRange: see :meth:`KvCache.check`; nothing has changed.
            FailedPrecondition: ``engine_closed``.
            ConductorError: of the device.
        """
        return self._step(batch, self._run, lambda forward: forward.logits())

    def step_serial(self, batch: Batch) -> NDArray[np.float32]:
        """The same result from one layer at a time: transfer, wait, compute, wait."""
        return self._step(batch, self._run_serial, lambda forward: forward.logits())

    def step_best(self, batch: Batch) -> NDArray[np.int32]:
        """Like :meth:`step`, but only the most probable token after each wanted one
        (len(batch.wanted),): logits of many tokens take long to copy."""
        return self._step(batch, self._run, lambda forward: forward.best())

    def _step(
        self, batch: Batch, run: Callable[[], None], result: Callable[[Forward], _Result]
    ) -> _Result:
        assembly = self._open()
        self._cache.check(batch)
        # From here on its positions may be overwritten.
        self._cache.forget(batch)
        try:
            assembly.forward.begin(batch)
            run()
            found = result(assembly.forward)
        except Exception:
            raise
        except BaseException:
            # Threads or kernels may be at work still: nothing can follow safely.
            self.close()
            raise
        self._cache.keep(batch)
        return found

    def _run(self) -> None:
        # Not for transfers that are ahead: they go on while the caller chooses the next tokens.
        self._pipeline.wait(self._pipeline.run(self._compute))

    def _run_serial(self) -> None:
        self._pipeline.run_serial(self._compute)

    def _compute(self, unit: int, slot: Any) -> None:
        assembly = self._open()
        assembly.forward.unit(unit, assembly.resident[unit] if slot is None else slot)

    @property
    def lengths(self) -> list[int]:
        """Positions that each sequence holds."""
        return [int(length) for length in self._cache.lengths]

    def spans(self) -> list[Span]:
        """When everything ran since the last call, if it is timed."""
        streams = self._open().streams
        self._pipeline.synchronise()
        return streams.spans()

    def reset(self) -> None:
        """Forget all sequences."""
        self._open()
        self._cache.reset()

    def close(self) -> None:
        """Give everything back. May be called twice."""
        assembly, self._assembly = self._assembly, None
        if assembly is not None:
            assembly.close()
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> Assembly:
        if self._assembly is None:
            raise FailedPrecondition(
                "engine_closed", f"the engine of {self.model.gguf.path} was closed; open it again"
            )
        return self._assembly


def check_window(window_layers: int) -> None:
    """Raises InvalidArgument ``bad_window``. *Pure.*"""
    if not WINDOW_LAYERS_MIN <= window_layers <= WINDOW_LAYERS_MAX:
        raise InvalidArgument(
            "bad_window",
            f"a window of {window_layers} layers; it is {WINDOW_LAYERS_MIN} to "
            f"{WINDOW_LAYERS_MAX}: with fewer nothing overlaps, with more nothing is gained",
            window_layers=window_layers,
        )


def spread(n_layer: int, count: int) -> frozenset[int]:
    """``count`` of the layers, as far from each other as possible. *Pure.*

    Raises:
        InvalidArgument: ``bad_resident``.
    """
    if not 0 <= count <= n_layer:
        raise InvalidArgument(
            "bad_resident",
            f"{count} resident layers of a model that has {n_layer}; give 0 to {n_layer}",
            resident_layers=count,
            n_layer=n_layer,
        )
    return frozenset((2 * at + 1) * n_layer // (2 * count) for at in range(count))


def _assembler(device: str) -> Callable[[Plan], Assembly]:
    """Raises InvalidArgument ``no_such_device``."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return assemble_host
    if kind != "cuda":
        raise InvalidArgument(
            "no_such_device", f"{device!r} is no device; write cpu, cuda:0 …", device=device
        )
    # The host needs neither CuPy nor NVML.
    from vram_conductor.worker.pipeline.assembly_cuda import assemble_cuda

    return partial(assemble_cuda, device)


def _figures(plan: Plan, assembly: Assembly) -> Figures:
    units = enumerate(plan.model.units)
    return Figures(
        window_bytes=plan.window_layers * plan.slot_bytes,
        resident_bytes=assembly.resident_bytes,
        kv_bytes=assembly.forward.kv_bytes,
        activation_bytes=assembly.forward.activation_bytes,
        streamed_bytes=sum(unit.n_bytes for at, unit in units if at not in plan.resident),
    )
