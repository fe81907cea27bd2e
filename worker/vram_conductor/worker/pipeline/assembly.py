"""What a layer engine consists of on one device; the host's is put together here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.memory import host_memory
from vram_conductor.worker.pipeline.forward import Capacity, Forward
from vram_conductor.worker.pipeline.forward_host import HostForward
from vram_conductor.worker.pipeline.kv_cache import kv_bytes
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.stream_host import HostStreams
from vram_conductor.worker.pipeline.streams import Streams


@dataclass(frozen=True)
class Plan:
    """What is to be built.

    Attributes:
        window_layers: slots that units travel into.
        resident: units that stay on the device.
        timed: keep when everything ran.
    """

    model: ModelFile
    capacity: Capacity
    window_layers: int
    resident: Collection[int] = ()
    timed: bool = False

    @property
    def slot_bytes(self) -> int:
        """Of the largest unit that travels; 0 if none does."""
        units = enumerate(self.model.units)
        return max((unit.n_bytes for at, unit in units if at not in self.resident), default=0)

    @property
    def resident_bytes(self) -> int:
        """Of the units that stay."""
        return sum(self.model.units[at].n_bytes for at in self.resident)


@dataclass(frozen=True)
class Assembly:
    """Streams, computation and resident units, open.

    Attributes:
        resident: unit → what the computation gets for its slot.
        resident_bytes: that they take on the device.
    """

    streams: Streams
    forward: Forward
    resident: Mapping[int, Any]
    resident_bytes: int

    def close(self) -> None:
        """Give everything back. May be called twice."""
        # Threads and kernels may still use what the computation owns.
        self.streams.close()
        self.forward.close()


def assemble_host(plan: Plan) -> Assembly:
    """Threads and NumPy: units are read from the file.

    Raises:
        ResourceExhausted: ``host_memory_short``, before anything is allocated or read.
    """
    model, it = plan.model, plan.model.hyperparameters
    units = model.units
    cache = kv_bytes(plan.capacity, it.n_layer, it.kv_width)
    # Else it would be refused late: memory is given when it is touched.
    check_room(plan, cache, 0, "host_memory_short", "the host", host_memory().available_bytes)
    resident = {at: _filled(model, at) for at in plan.resident}
    forward = HostForward(model, plan.capacity)

    def fill(unit: int, slot: NDArray[np.uint8]) -> None:
        model.fill(units[unit], slot)

    streams = HostStreams(fill, plan.window_layers, plan.slot_bytes, timed=plan.timed)
    return Assembly(streams, forward, resident, plan.resident_bytes)


def check_room(
    plan: Plan,
    kv_bytes: int,
    activation_bytes: int,
    reason: str,
    where: str,
    free_bytes: int,
) -> None:
    """Whether all of it fits what is free. *Pure.*

    Raises:
        ResourceExhausted: ``reason``, with what each part takes.
    """
    parts: dict[str, Any] = {
        "window_bytes": plan.window_layers * plan.slot_bytes,
        "resident_bytes": plan.resident_bytes,
        "kv_bytes": kv_bytes,
        "activation_bytes": activation_bytes,
    }
    need_bytes = sum(parts.values())
    if need_bytes > free_bytes:
        window, resident, kv, rest = parts.values()
        raise ResourceExhausted(
            reason,
            f"{need_bytes} bytes are needed on {where} (window of {plan.window_layers}: "
            f"{window}, resident layers: {resident}, KV cache: {kv}, activations: {rest}) and "
            f"{free_bytes} are free: end what else uses it, or take fewer window layers, resident "
            "layers, sequences or tokens of context",
            need_bytes=need_bytes,
            free_bytes=free_bytes,
            **parts,
        )


def _filled(model: ModelFile, index: int) -> NDArray[np.uint8]:
    unit = model.units[index]
    return model.fill(unit, np.empty(unit.n_bytes, np.uint8))
