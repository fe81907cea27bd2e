"""Opens the pipeline bench's made-up layers on a device, if what they need is there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from vram_conductor.protocol.errors import InvalidArgument, ResourceExhausted
from vram_conductor.worker.memory import host_memory
from vram_conductor.worker.pipeline.measure import Payload
from vram_conductor.worker.pipeline.synthetic import Synthetic
from vram_conductor.worker.pipeline.synthetic_host import SyntheticHost

LAYERS = (1, 4096)
SLOTS = (2, 4)
THREADS = 2
"""One copies, one computes."""

LOAD_ROOM = 0.5
"""What other programs do now and then."""

GROUP_BYTES = 16
"""Layers are made of groups of four 32-bit floats."""


class AdjustablePayload(Payload, Protocol):
    """One whose computation can be made longer."""

    def iterate(self, iterations: int) -> None:
        """So many per unit from now on."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class Shape:
    """What is streamed through how many slots.

    Raises:
        InvalidArgument: ``bad_layers``, ``bad_slots``, ``bad_layer_bytes``.
    """

    n_layers: int
    bytes_per_layer: int
    slots: int

    def __post_init__(self) -> None:
        check_within("bad_layers", "--n-layers", self.n_layers, LAYERS)
        check_within("bad_slots", "--slots", self.slots, SLOTS)
        size = self.bytes_per_layer
        if size <= 0 or size % GROUP_BYTES:
            raise InvalidArgument(
                "bad_layer_bytes",
                f"--bytes-per-layer {size}: a layer is made of groups of four 32-bit floats; take "
                f"a multiple of {GROUP_BYTES} bytes, such as 16MiB",
                bytes_per_layer=size,
                multiple=GROUP_BYTES,
            )

    @property
    def payload_bytes(self) -> int:
        """Of all layers."""
        return self.n_layers * self.bytes_per_layer

    @property
    def window_bytes(self) -> int:
        """Of all slots."""
        return self.slots * self.bytes_per_layer


def check_within(reason: str, flag: str, value: int, limits: tuple[int, int]) -> None:
    """Raises InvalidArgument ``reason`` unless the value is one of ``limits`` or between them."""
    least, most = limits
    if not least <= value <= most:
        raise InvalidArgument(
            reason, f"{flag} {value}: take {least} to {most}", value=value, least=least, most=most
        )


@dataclass(frozen=True)
class Opened:
    """A payload on a device.

    Attributes:
        where: what travels from where to where, in words.
        notes: what may spoil the figures.
    """

    payload: AdjustablePayload
    device_name: str
    where: str
    notes: tuple[str, ...] = ()


@contextmanager
def opened(device: str, shape: Shape) -> Iterator[Opened]:
    """The layers on a device.

    Args:
        device: ``cpu`` or ``cuda:N``.

    Raises:
        ResourceExhausted: ``host_memory_short``, ``disk_short``, ``device_memory_short``.
        ConductorError: what the device lacks.
    """
    with _on_cuda(device, shape) if device.startswith("cuda") else _on_host(shape) as found:
        yield found


@contextmanager
def _on_cuda(device: str, shape: Shape) -> Iterator[Opened]:
    # What runs on the host does without CuPy.
    from vram_conductor.worker.pipeline.cuda import Cuda
    from vram_conductor.worker.pipeline.synthetic_cuda import SyntheticCuda

    gpu = Cuda.of(device)
    free_bytes = gpu.free_bytes
    if shape.window_bytes > free_bytes:
        raise _short(
            "device_memory_short",
            f"{shape.slots} slots of {shape.bytes_per_layer} bytes",
            shape.window_bytes,
            f"on {gpu.name}",
            free_bytes,
        )
    _check_host(f"{shape.n_layers} layers of {shape.bytes_per_layer} bytes", shape.payload_bytes)
    payload = SyntheticCuda(gpu, _synthetic(shape), shape.slots)
    try:
        yield Opened(payload, gpu.name, "from pinned host memory to the GPU, beside its kernels")
    finally:
        payload.close()
        gpu.close()


@contextmanager
def _on_host(shape: Shape) -> Iterator[Opened]:
    _check_host(f"{shape.slots} slots of {shape.bytes_per_layer} bytes", shape.window_bytes)
    notes = busy_notes(os.getloadavg()[0], len(os.sched_getaffinity(0)))
    with tempfile.TemporaryFile() as file:
        _take_room(file, shape)
        payload = SyntheticHost(file, _synthetic(shape), shape.slots)
        try:
            yield Opened(
                payload,
                "",
                "no GPU: from a memory-mapped file into buffers in memory, copied by one thread "
                "while another one computes; the schedule is that of a GPU",
                notes,
            )
        finally:
            payload.close()


def busy_notes(load: float, cores: int) -> tuple[str, ...]:
    """What to say if two more threads find no core of their own.

    Args:
        load: mean number of threads that ran or wanted to, before.
    """
    if load + THREADS <= cores + LOAD_ROOM:
        return ()
    return (
        f"{cores} cores were busy already (load {load:.1f}), and two threads that wait for cores "
        "overlap little: these figures say more about the machine's load",
    )


def _synthetic(shape: Shape) -> Synthetic:
    return Synthetic(shape.n_layers, shape.bytes_per_layer, 1)


def _check_host(what: str, need_bytes: int) -> None:
    available_bytes = host_memory().available_bytes
    if need_bytes > available_bytes:
        raise _short("host_memory_short", what, need_bytes, "in memory", available_bytes)


def _take_room(file: BinaryIO, shape: Shape) -> None:
    """Written through a mapping, a full disk would end the process."""
    folder, need_bytes = tempfile.gettempdir(), shape.payload_bytes
    free_bytes = shutil.disk_usage(folder).free
    try:
        if need_bytes <= free_bytes:
            os.posix_fallocate(file.fileno(), 0, need_bytes)
            return
    except OSError:
        pass
    what = f"{shape.n_layers} layers of {shape.bytes_per_layer} bytes"
    raise _short("disk_short", what, need_bytes, f"in {folder} (TMPDIR names another)", free_bytes)


def _short(
    reason: str, what: str, need_bytes: int, where: str, free_bytes: int
) -> ResourceExhausted:
    return ResourceExhausted(
        reason,
        f"{what} need {need_bytes} bytes, and {free_bytes} are free {where}: take fewer or "
        "smaller layers (--n-layers, --bytes-per-layer, --slots)",
        need_bytes=need_bytes,
        free_bytes=free_bytes,
    )
