"""A payload whose computation is known: units of random numbers, and what must come out of each.
*Pure.*

Two neighbouring floats are a point (x, y). One iteration is ``x += s·y`` and then ``y -= s·x``: one
multiply-add per float, and a linear map of determinant 1, so that points neither fade nor grow
however many iterations there are, and rounding hardly adds up. The result of a unit is the sum of
all x and the sum of all y, in :data:`PARTS` parts; in float64 it follows from the sums before
and the map's power alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import DataLoss

PARTS = 1024
"""Results per unit: one per block of threads."""

PIECE = 1024
"""Floats that a part takes at once: four per thread. Part ``p`` has pieces p, p + PARTS …"""

STEP = np.float32(0.25)
TOLERANCE = 2e-4
"""Of a result, relative to the sum of absolute values: hundreds of times what rounding does, a
hundredth of what one piece of another unit would."""

_CACHED = 64 * PIECE

Points = tuple[NDArray[np.float32], NDArray[np.float32]]
"""All x, all y."""


@dataclass(frozen=True)
class Synthetic:
    """``n_units`` of ``unit_bytes`` (the last 15 or fewer beyond whole sixteens are ignored), and
    ``iterations`` on each."""

    n_units: int
    unit_bytes: int
    iterations: int

    def fill(self, unit: int, out: NDArray[np.uint8]) -> None:
        """The unit's bytes: one to two above a whole number that its neighbours do not have."""
        values = self.values(out)
        np.random.default_rng(unit).random(dtype=np.float32, out=values)
        values += np.float32(1 + unit % 7)

    def values(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The floats that are computed on."""
        return data[: self.unit_bytes // 16 * 16].view(np.float32)

    def compute(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The results (PARTS, 2) of a unit with these bytes, in float32, by this thread."""

        def moved(x: NDArray[np.float32], y: NDArray[np.float32]) -> Points:
            x, y, more = x.copy(), y.copy(), np.empty_like(x)
            for _ in range(self.iterations):
                x += np.multiply(y, STEP, out=more)
                y -= np.multiply(x, STEP, out=more)
            return x, y

        return self._parts(data, moved).astype(np.float32)

    def check(self, unit: int, results: NDArray[np.float32], data: NDArray[np.uint8]) -> None:
        """Whether ``results`` (PARTS, 2) are those of a unit with these bytes.

        Raises:
            DataLoss: ``wrong_result``: the unit, the worst part, and both numbers.
        """
        self.compare(unit, results, self.before(data))

    def before(self, data: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The sums (PARTS, 2) before any iteration: all that a check needs of a unit."""
        return self._parts(data, lambda x, y: (x, y))

    def compare(self, unit: int, results: NDArray[np.float32], before: NDArray[np.float64]) -> None:
        """:meth:`check`, with what :meth:`before` gave.

        Raises:
            DataLoss: ``wrong_result``.
        """
        step = float(STEP)
        once = np.array([[1, step], [-step, 1 - step * step]])
        wanted = before @ np.linalg.matrix_power(once, self.iterations).T
        # All values are positive.
        room = TOLERANCE * before.sum(axis=1, keepdims=True)
        # Poison is not a number, and nothing is farther from a right one.
        off = np.where(np.isnan(results), np.inf, np.abs(results - wanted)) - room
        if (off > 0).any():
            part, which = np.unravel_index(int(off.argmax()), off.shape)
            found, right = float(results[part, which]), float(wanted[part, which])
            raise DataLoss(
                "wrong_result",
                f"unit {unit}, part {part}: computed {found:.6g}, right is {right:.6g}; the "
                "computation did not see the unit's bytes: report this, and check the device's "
                "memory",
                unit=unit,
                part=int(part),
                found=found,
                right=right,
            )

    def _parts(
        self,
        data: NDArray[np.uint8],
        moved: Callable[[NDArray[np.float32], NDArray[np.float32]], Points],
    ) -> NDArray[np.float64]:
        """Sums (PARTS, 2) of x and of y after ``moved``, which is given as much at once as stays
        in the cache."""
        values = self.values(data)
        pieces = np.zeros((-(-len(values) // (PIECE * PARTS)) * PARTS, 2))
        for start in range(0, len(values), _CACHED):
            x, y = values[start : start + _CACHED].reshape(-1, 2).T
            for which, points in enumerate(moved(x, y)):
                found = np.add.reduceat(points, np.arange(0, len(x), PIECE // 2), dtype=np.float64)
                pieces[start // PIECE :, which][: len(found)] = found
        sums: NDArray[np.float64] = pieces.reshape(-1, PARTS, 2).sum(axis=0)
        return sums
