"""Opens the pipeline bench's made-up layers on a device, if what they need is there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from vram_conductor.protocol.errors import InvalidArgument, ResourceExhausted
from vram_conductor.worker.bench.phases import Phases
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

    def lay_out(self, payload: Synthetic) -> None:
        """Other units of the same bytes."""

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

    @property
    def synthetic(self) -> Synthetic:
        """The layers, with one iteration."""
        return Synthetic(self.n_layers, self.bytes_per_layer, 1)


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
        shapes: that there is room for; the payload has that of the largest.
        refused: the others, and why.
        notes: what may spoil the figures.
    """

    payload: AdjustablePayload
    device_name: str
    where: str
    shapes: list[Shape]
    refused: list[tuple[Shape, ResourceExhausted]] = field(default_factory=list)
    notes: tuple[str, ...] = ()


@contextmanager
def opened(device: str, shapes: Sequence[Shape], phases: Phases) -> Generator[Opened]:
    """Layers on a device: memory is taken once, for the largest shape that fits.

    Args:
        device: ``cpu`` or ``cuda:N``.
        shapes: at least one, all with the same number of slots. One of them has both the most
            bytes in all and the largest layers.
        phases: is told what it takes.

    Raises:
        ResourceExhausted: ``host_memory_short``, ``disk_short``, ``device_memory_short``: there is
            room for none.
        ConductorError: what the device lacks.
    """
    on_cuda = device.startswith("cuda")
    with _on_cuda(device, shapes, phases) if on_cuda else _on_host(shapes, phases) as found:
        yield found


@contextmanager
def _on_cuda(device: str, shapes: Sequence[Shape], phases: Phases) -> Generator[Opened]:
    # What runs on the host does without CuPy.
    with phases.phase("device"):
        from vram_conductor.worker.pipeline.cuda import Cuda
        from vram_conductor.worker.pipeline.synthetic_cuda import SyntheticCuda

        gpu = Cuda.of(device)
    free_bytes = gpu.free_bytes

    def check(shape: Shape) -> None:
        window_bytes = shape.window_bytes
        if window_bytes > free_bytes:
            what = f"{shape.slots} slots of {shape.bytes_per_layer} bytes"
            where = f"on {gpu.name}"
            raise _short("device_memory_short", what, window_bytes, where, free_bytes)
        _check_host(_layers(shape), shape.payload_bytes)

    fitting, refused = _fitting(shapes, check)
    with phases.phase("layers"):
        largest = _largest(fitting)
        payload = SyntheticCuda(gpu, largest.synthetic, largest.slots)
    where = "from pinned host memory to the GPU, beside its kernels"
    try:
        yield Opened(payload, gpu.name, where, fitting, refused)
    finally:
        payload.close()
        gpu.close()


@contextmanager
def _on_host(shapes: Sequence[Shape], phases: Phases) -> Generator[Opened]:
    notes = busy_notes(os.getloadavg()[0], len(os.sched_getaffinity(0)))
    folder = tempfile.gettempdir()

    def check(shape: Shape) -> None:
        _check_host(f"{shape.slots} slots of {shape.bytes_per_layer} bytes", shape.window_bytes)
        if shape.payload_bytes > shutil.disk_usage(folder).free:
            raise _disk_short(shape, folder)

    fitting, refused = _fitting(shapes, check)
    largest = _largest(fitting)
    with tempfile.TemporaryFile() as file:
        with phases.phase("layers"):
            _take_room(file, largest, folder)
            payload = SyntheticHost(file, largest.synthetic, largest.slots)
        where = (
            "no GPU: from a memory-mapped file into buffers in memory, copied by one thread while "
            "another one computes; the schedule is that of a GPU"
        )
        try:
            yield Opened(payload, "", where, fitting, refused, notes)
        finally:
            payload.close()


def _fitting(
    shapes: Sequence[Shape], check: Callable[[Shape], None]
) -> tuple[list[Shape], list[tuple[Shape, ResourceExhausted]]]:
    """Those that ``check`` has nothing against, and the others.

    Raises:
        ResourceExhausted: what it has against the first, if there are only others.
    """
    fitting: list[Shape] = []
    refused: list[tuple[Shape, ResourceExhausted]] = []
    for shape in shapes:
        try:
            check(shape)
            fitting.append(shape)
        except ResourceExhausted as error:
            refused.append((shape, error))
    if not fitting:
        raise refused[0][1]
    return fitting, refused


def _largest(shapes: Sequence[Shape]) -> Shape:
    return max(shapes, key=lambda shape: (shape.payload_bytes, shape.bytes_per_layer))


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


def _check_host(what: str, need_bytes: int) -> None:
    available_bytes = host_memory().available_bytes
    if need_bytes > available_bytes:
        raise _short("host_memory_short", what, need_bytes, "in memory", available_bytes)


def _take_room(file: BinaryIO, shape: Shape, folder: str) -> None:
    """Written through a mapping, a full disk would end the process."""
    try:
        os.posix_fallocate(file.fileno(), 0, shape.payload_bytes)
    except OSError as error:
        # It may be a limit of files or of this user, and not the disk's.
        raise _disk_short(shape, folder, f"{error.strerror}; ") from None


def _disk_short(shape: Shape, folder: str, why: str = "") -> ResourceExhausted:
    return _short(
        "disk_short",
        _layers(shape),
        shape.payload_bytes,
        f"in {folder} ({why}TMPDIR names another)",
        shutil.disk_usage(folder).free,
    )


def _layers(shape: Shape) -> str:
    return f"{shape.n_layers} layers of {shape.bytes_per_layer} bytes"


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
