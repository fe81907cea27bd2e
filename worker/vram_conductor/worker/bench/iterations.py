"""How many iterations make a computation take as long as one wants. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable

ITERATIONS_MAX = 10_000_000
CLOSE = 0.01
"""Of the wanted time; nearer is not asked for."""

_GROWTH = 8
_LOOKS_MAX = 12
"""Between two counts that the wanted one lies between."""


def find_iterations(
    compute_ms: Callable[[int], float],
    wanted_ms: float,
    most: int = ITERATIONS_MAX,
    times: dict[int, float] | None = None,
) -> int:
    """The count from 1 to ``most`` whose time was nearest to what is wanted.

    Args:
        compute_ms: measures a count; about linear in it from some count on.
        times: what it gave for counts before; what it gives now is added.
    """
    times = {} if times is None else times
    if not times:
        times[1] = compute_ms(1)
    while max(times.values()) < wanted_ms and max(times) < most:
        last = max(times)
        guess = int(last * min(_GROWTH, 1.05 * wanted_ms / max(times[last], 1e-9)))
        count = min(most, max(2 * last, guess))
        times[count] = compute_ms(count)

    def off(count: int) -> float:
        return abs(times[count] - wanted_ms)

    for _ in range(_LOOKS_MAX):
        if min(map(off, times)) <= CLOSE * wanted_ms:
            break
        below = max((n for n in times if times[n] < wanted_ms), default=None)
        above = min((n for n in times if times[n] >= wanted_ms), default=None)
        if below is None or above is None or above - below < 2:
            break
        share = (wanted_ms - times[below]) / (times[above] - times[below])
        count = min(above - 1, max(below + 1, round(below + share * (above - below))))
        times[count] = compute_ms(count)
    return min(times, key=off)
