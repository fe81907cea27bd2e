"""What the layer pipeline gains with made-up layers, from transfer-bound to compute-bound."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.bench.iterations import ITERATIONS_MAX, find_iterations
from vram_conductor.worker.bench.pipeline_payload import (
    AdjustablePayload,
    Opened,
    Shape,
    check_within,
    opened,
)
from vram_conductor.worker.pipeline.measure import Measurement, Rounds, measure

MIB = 1 << 20
REPEATS = (1, 1000)

GRID = tuple((layers, mib * MIB) for layers in (16, 64) for mib in (16, 64))
GRID_RATIOS = (0.25, 0.5, 0.9, 1.0, 1.1, 2.0, 4.0)
"""Of computation to transfer."""

SMALL_GRID = ((8, 4 * MIB), (16, 4 * MIB))
SMALL_RATIOS = (1.0, 8.0, 16.0)
"""No CPU computes as fast as it copies: the first one takes as little computation as there is."""


@dataclass
class Found:
    """What the client is told.

    Attributes:
        where: what travels from where to where, in words.
        rows: one per setting, see :func:`_row`.
        failures: settings that could not be measured.
    """

    device_name: str = ""
    where: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def put(self, it: Opened) -> AdjustablePayload:
        """Where it is measured; returns what is measured."""
        self.device_name, self.where = it.device_name, it.where
        self.notes += [note for note in it.notes if not self.rows]
        return it.payload


def measure_setting(device: str, shape: Shape, iterations: int, repeats: int) -> Found:
    """One setting.

    Args:
        device: ``cpu`` or ``cuda:N``.
        iterations: 0: so many that computation takes as long as transfer, if it can.

    Raises:
        InvalidArgument: ``bad_iterations``, ``bad_repeats``.
        ResourceExhausted: ``host_memory_short``, ``disk_short``, ``device_memory_short``.
        DataLoss: ``wrong_result``.
        ConductorError: what the device lacks.
    """
    check_within("bad_iterations", "--compute-iters", iterations, (0, ITERATIONS_MAX))
    check_within("bad_repeats", "--repeats", repeats, REPEATS)
    found = Found()
    with opened(device, shape) as it:
        payload = found.put(it)
        aim = None if iterations else 1.0
        found.rows.append(_measured(payload, shape, iterations, aim, repeats))
    return found


def measure_grid(device: str, slots: int, repeats: int, seconds: float) -> Found:
    """Many settings, as far as the time reaches.

    Raises:
        InvalidArgument: ``bad_slots``, ``bad_repeats``.
        DataLoss: ``wrong_result``.
        ConductorError: what the device lacks for the first of them.
    """
    check_within("bad_repeats", "--repeats", repeats, REPEATS)
    until = time.monotonic() + seconds
    on_cuda = device.startswith("cuda")
    shapes = [Shape(*size, slots) for size in (GRID if on_cuda else SMALL_GRID)]
    ratios = GRID_RATIOS if on_cuda else SMALL_RATIOS
    found = Found()
    for shape in shapes:
        try:
            with opened(device, shape) as it:
                _measure_ratios(found, found.put(it), shape, ratios, repeats, until)
        except ConductorError as error:
            if not found.rows or error.reason == "wrong_result":
                raise
            found.failures.append(f"{_name(shape)}: {error.info.message}")
    return found


def _measure_ratios(
    found: Found,
    payload: AdjustablePayload,
    shape: Shape,
    ratios: tuple[float, ...],
    repeats: int,
    until: float,
) -> None:
    for ratio in ratios:
        if time.monotonic() > until and found.rows:
            found.notes.append(f"no time was left for {_name(shape)} at C/T {ratio:g}")
        else:
            found.rows.append(_measured(payload, shape, 0, ratio, repeats))


def _name(shape: Shape) -> str:
    return f"{shape.n_layers} layers of {shape.bytes_per_layer / MIB:g} MiB"


def _measured(
    payload: AdjustablePayload, shape: Shape, iterations: int, aim: float | None, repeats: int
) -> dict[str, Any]:
    """A row. ``aim``: computation over transfer, where iterations are to be found."""
    if aim is not None:
        iterations = _iterations(payload, shape, aim)
    payload.iterate(iterations)
    return _row(shape, iterations, aim, measure(payload, shape.n_layers, repeats))


def _iterations(payload: AdjustablePayload, shape: Shape, aim: float) -> int:
    rounds = Rounds(payload, shape.n_layers)

    def compute_ms(count: int) -> float:
        payload.iterate(count)
        return rounds.alone_ms("compute")

    # The first time is slower.
    compute_ms(1)
    rounds.alone_ms("transfer")
    return find_iterations(compute_ms, aim * rounds.alone_ms("transfer"))


def _row(shape: Shape, iterations: int, aim: float | None, measured: Measurement) -> dict[str, Any]:
    plain = dataclasses.asdict(measured)
    timelines = {"serial": plain.pop("serial"), "overlapped": plain.pop("single")}
    return {
        **dataclasses.asdict(shape),
        "iterations": iterations,
        "aim": aim,
        **plain,
        "single_optimum_ms": measured.single_optimum_ms,
        "bound": measured.bound,
        "share": measured.share,
        "timelines": timelines,
    }
