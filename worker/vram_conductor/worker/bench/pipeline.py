"""What the layer pipeline gains with made-up layers, from transfer-bound to compute-bound."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.bench.iterations import ITERATIONS_MAX, find_iterations
from vram_conductor.worker.bench.phases import Phases
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

GRID = tuple((layers, mib * MIB) for layers in (64, 16) for mib in (64, 16))
GRID_RATIOS = (1.0, 0.25, 4.0, 0.5, 2.0, 0.9, 1.1)
"""Of computation to transfer; the first ones tell most, if time is short."""

SMALL_GRID = ((16, 4 * MIB), (8, 4 * MIB))
SMALL_RATIOS = (1.0, 8.0, 16.0)
"""No CPU computes as fast as it copies: the first one takes as little computation as there is."""

LOOKED_AT = 8
"""Layers that are computed to find out how long it takes."""


@dataclass(frozen=True)
class Aim:
    """A setting of the grid.

    Attributes:
        ratio: of computation to transfer.
    """

    shape: Shape
    ratio: float

    def __str__(self) -> str:
        return f"{_name(self.shape)} at C/T {self.ratio:g}"


class Budget:
    """Whether the next setting can be measured in time. *Pure.*

    Args:
        until_s: on the clock of what :meth:`allows` is told.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._rates: dict[Shape, float] = {}

    def allows(self, aim: Aim, now_s: float) -> bool:
        """Going by one of the same shape, else by the slowest so far; the first one always is."""
        if not self._rates:
            return True
        rate = self._rates.get(aim.shape, max(self._rates.values()))
        return now_s + rate * _work(aim.shape, aim.ratio) <= self._until_s

    def note(self, shape: Shape, ratio: float, seconds: float) -> None:
        """What one took, with the ratio that was reached."""
        self._rates[shape] = seconds / _work(shape, ratio)


def _work(shape: Shape, ratio: float) -> float:
    return shape.payload_bytes * (1 + ratio)


@dataclass
class Found:
    """What the client is told.

    Attributes:
        where: what travels from where to where, in words.
        rows: one per setting, see :func:`_row`.
        failures: settings that could not be measured.
        seconds: what took how long: ``device`` (driver and compiler), ``layers`` (memory, and
            what is in it), ``iterations`` (finding how many), ``passes`` (what is measured).
    """

    device_name: str = ""
    where: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def put(self, it: Opened) -> AdjustablePayload:
        """Where it is measured; returns what is measured."""
        self.device_name, self.where = it.device_name, it.where
        self.notes += it.notes
        self.failures += [f"{_name(shape)}: {error.info.message}" for shape, error in it.refused]
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
    found, phases = Found(), Phases()
    with opened(device, [shape], phases) as it:
        bench = _Bench(found.put(it), shape, phases)
        ratio = None if iterations else 1.0
        found.rows.append(bench.measured(iterations, ratio, repeats))
    found.seconds = phases.seconds
    return found


def measure_grid(
    device: str,
    slots: int,
    repeats: int,
    seconds: float,
    news: Callable[[str], None] = lambda text: None,
) -> Found:
    """Many settings, as far as the time reaches; those that tell most come first.

    Args:
        seconds: for everything. One setting is measured in any case.
        news: is told what is done now.

    Raises:
        InvalidArgument: ``bad_slots``, ``bad_repeats``.
        DataLoss: ``wrong_result``.
        ConductorError: what the device lacks for all of them.
    """
    check_within("bad_repeats", "--repeats", repeats, REPEATS)
    budget = Budget(time.monotonic() + seconds)
    on_cuda = device.startswith("cuda")
    shapes = [Shape(*size, slots) for size in (GRID if on_cuda else SMALL_GRID)]
    ratios = GRID_RATIOS if on_cuda else SMALL_RATIOS
    found, phases = Found(), Phases()
    news("making layers")
    with opened(device, shapes, phases) as it:
        bench = _Bench(found.put(it), shapes[0], phases)
        aims = [Aim(shape, ratio) for ratio in ratios for shape in it.shapes]
        _measure_aims(found, bench, aims, repeats, budget, news)
    found.rows.sort(key=lambda row: (row["n_layers"], row["bytes_per_layer"], row["aim"]))
    found.seconds = phases.seconds
    return found


def _measure_aims(
    found: Found,
    bench: _Bench,
    aims: list[Aim],
    repeats: int,
    budget: Budget,
    news: Callable[[str], None],
) -> None:
    left_out: list[Aim] = []
    for at, aim in enumerate(aims):
        began_s = time.monotonic()
        if not budget.allows(aim, began_s):
            left_out.append(aim)
            continue
        news(f"{at + 1} of {len(aims)}: {aim}")
        try:
            bench.lay_out(aim.shape)
            row = bench.measured(0, aim.ratio, repeats)
        except ConductorError as error:
            if not found.rows or error.reason == "wrong_result":
                raise
            found.failures.append(f"{aim}, and all after it: {error.info.message}")
            break
        found.rows.append(row)
        budget.note(aim.shape, row["compute_ms"] / row["transfer_ms"], time.monotonic() - began_s)
    found.notes += _left_out_notes(left_out)


def _left_out_notes(aims: Iterable[Aim]) -> list[str]:
    names: dict[float, list[str]] = {}
    for aim in aims:
        names.setdefault(aim.ratio, []).append(_name(aim.shape))
    return [f"no time was left for C/T {ratio:g}: {', '.join(names[ratio])}" for ratio in names]


def _name(shape: Shape) -> str:
    return f"{shape.n_layers} layers of {shape.bytes_per_layer / MIB:g} MiB"


class _Bench:
    """Measures settings of one payload.

    Args:
        shape: what it is now.
    """

    def __init__(self, payload: AdjustablePayload, shape: Shape, phases: Phases) -> None:
        self._payload = payload
        self._shape = shape
        self._phases = phases
        self._times: dict[Shape, dict[int, float]] = {}

    def lay_out(self, shape: Shape) -> None:
        """From now on it is this; there is room for it."""
        with self._phases.phase("layers"):
            self._payload.lay_out(shape.synthetic)
        self._shape = shape

    def measured(self, iterations: int, ratio: float | None, repeats: int) -> dict[str, Any]:
        """A row. ``ratio``: of computation to transfer, where iterations are to be found."""
        if ratio is not None:
            with self._phases.phase("iterations"):
                iterations = self._iterations(ratio)
        with self._phases.phase("passes"):
            self._payload.iterate(iterations)
            found = measure(self._payload, self._shape.n_layers, repeats)
        return _row(self._shape, iterations, ratio, found)

    def _iterations(self, ratio: float) -> int:
        n_layers = self._shape.n_layers
        rounds = Rounds(self._payload, n_layers)
        some = min(LOOKED_AT, n_layers)

        def compute_ms(count: int) -> float:
            self._payload.iterate(count)
            return rounds.alone_ms("compute", some)

        times = self._times.setdefault(self._shape, {})
        if not times:
            # The first time is slower.
            compute_ms(1)
            rounds.alone_ms("transfer")
        wanted_ms = ratio * rounds.alone_ms("transfer") * some / n_layers
        return find_iterations(compute_ms, wanted_ms, times=times)


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
