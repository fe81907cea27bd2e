"""Numbers and tables for people: sizes, durations, bars, aligned columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n_bytes: int) -> str:
    """``1610612736`` → ``1.50 GiB``; three significant digits, binary units."""
    value, unit = float(n_bytes), 0
    while abs(value) >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{n_bytes} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def duration(ms: float) -> str:
    """``0.4 ms``, ``35 ms``, ``1.23 s``, ``2 min 5 s``."""
    if ms < 10:
        return f"{ms:.1f} ms"
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.2f} s"
    minutes, rest = divmod(round(ms / 1000), 60)
    return f"{minutes} min {rest} s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns, two spaces apart; ``right`` lists the columns aligned to the right."""
    widths = [len(cell) for cell in header]
    for row in rows:
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]

    def line(cells: Sequence[str]) -> str:
        out = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(out).rstrip()

    return "\n".join([line(header), *(line(row) for row in rows)])


def bar(parts: Sequence[tuple[str, int]], total: int, width: int) -> str:
    """One row of ``width`` characters: each part drawn with its own character, the rest as dots.

    A part that is not empty gets at least one character, so that nothing promised is invisible;
    what is over the total is cut at the right edge.
    """
    if total <= 0:
        return "." * width
    cells = ""
    edge = 0
    for mark, value in parts:
        edge += max(0, value)
        upto = round(width * edge / total)
        if value > 0:
            upto = max(upto, len(cells) + 1)
        cells += mark * (upto - len(cells))
    return cells[:width].ljust(width, ".")
