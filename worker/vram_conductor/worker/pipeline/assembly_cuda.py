"""A layer engine's parts on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vram_conductor.worker.pipeline.assembly import Assembly, Plan, check_room
from vram_conductor.worker.pipeline.cuda import Cuda
from vram_conductor.worker.pipeline.forward_cuda import CudaForward, forward_bytes
from vram_conductor.worker.pipeline.gpu import DeviceMemory, Gpu, PinnedMemory
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.stream_cuda import CudaStreams

THREADS = 8
"""That read the file; disks and the page cache answer several at a time."""


@dataclass(frozen=True)
class CudaAssembly(Assembly):
    """``memory``: of the resident units."""

    gpu: Gpu
    memory: Sequence[DeviceMemory]

    def close(self) -> None:
        super().close()
        for memory in self.memory:
            memory.free()
        self.gpu.close()


def assemble_cuda(device: str, plan: Plan) -> CudaAssembly:
    """On ``cuda:N``; the process sees no other GPU from then on.

    Raises:
        ConductorError: those of :meth:`Cuda.of` and :func:`assemble_on`.
    """
    return assemble_on(Cuda.of(device), plan)


def assemble_on(gpu: Gpu, plan: Plan) -> CudaAssembly:
    """On this GPU, which the assembly closes.

    Raises:
        ResourceExhausted: ``device_memory_short``, before anything is allocated or read;
            ``host_memory_short``, ``pin_refused``.
        FailedPrecondition: ``nvrtc_missing``.
    """
    model = plan.model
    sizes = forward_bytes(model, plan.capacity, gpu.multiprocessors)
    check_room(plan, *sizes, "device_memory_short", gpu.name, gpu.free_bytes)
    streamed = [index for index in range(len(model.units)) if index not in plan.resident]
    places, end = [(0, 0)] * len(model.units), 0
    for index in streamed:
        places[index] = end, model.units[index].n_bytes
        end += model.units[index].n_bytes
    payload = gpu.pinned(end)
    memory: list[DeviceMemory] = []
    streams = CudaStreams(
        gpu, payload, places, plan.window_layers, plan.slot_bytes, timed=plan.timed
    )
    try:
        forward = CudaForward(gpu, streams.compute_stream, model, plan.capacity)
    except BaseException:
        streams.close()
        raise
    resident: dict[int, int] = {}
    assembly = CudaAssembly(
        streams,
        forward,
        resident,
        plan.resident_bytes,
        gpu,
        memory,
    )
    try:
        for index in plan.resident:
            unit = model.units[index]
            memory.append(gpu.allocate(unit.n_bytes))
            data = model.fill(unit, np.empty(unit.n_bytes, np.uint8))
            gpu.copy_to_device(memory[-1].address, data, streams.compute_stream)
            resident[index] = memory[-1].address
        _read(model, streamed, places, payload)
    except BaseException:
        assembly.close()
        raise
    return assembly


def _read(
    model: ModelFile,
    streamed: Sequence[int],
    places: Sequence[tuple[int, int]],
    payload: PinnedMemory,
) -> None:
    def fill(index: int) -> None:
        offset, size = places[index]
        model.fill(model.units[index], payload.array[offset : offset + size])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, streamed))
