"""Numbers and tables for people: sizes, durations, bars, aligned columns. *Pure.*"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GAP = "  "
_COLUMN_MIN = 8
"""No column is squeezed below this many characters."""


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
    """``0.4 ms``, ``35 ms``, ``1.23 s``, ``32.1 s``, ``2 min 5 s``, ``3 h 20 min``, ``4 d 2 h``."""
    if ms < 9.95:
        return f"{ms:.1f} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    if ms < 59_950:
        return f"{ms / 1000:.{2 if ms < 9_995 else 1}f} s"
    seconds = round(ms / 1000)
    for above, unit, below in ((86_400, "d", "h"), (3_600, "h", "min"), (60, "min", "s")):
        if seconds >= above:
            smaller = {"h": 3_600, "min": 60, "s": 1}[below]
            return f"{seconds // above} {unit} {seconds % above // smaller} {below}"
    return f"{seconds} s"


def plural(count: int, noun: str) -> str:
    """``1 agent``, ``2 agents``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters; what is left out of the middle shows as ``…``."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}" if width > 1 else text[:width]


def wrapped(text: str, width: int, indent: int = 0, hanging: int = 0) -> str:
    """``text`` in lines of at most ``width`` characters, long words excepted; every line begins
    with ``indent`` spaces, all but the first with ``hanging`` more."""
    return textwrap.fill(
        text,
        max(width, indent + hanging + _COLUMN_MIN),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    *,
    width: int | None = None,
    squeeze: Sequence[int] = (),
    wrap: Sequence[int] = (),
) -> str:
    """Aligned columns, two spaces apart.

    Args:
        right: columns that are aligned to the right.
        width: where the table would be wider than this, the columns of ``squeeze`` lose
            characters, the widest first, then those of ``wrap`` go over several lines.
    """
    widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
    if width is not None:
        for columns in (squeeze, wrap):
            _fit(widths, width, columns)
    lines = [_line([shorten(cell, widths[c]) for c, cell in enumerate(header)], widths, right)]
    for row in rows:
        cells = [
            textwrap.wrap(cell, widths[column], break_on_hyphens=False) or [""]
            if column in wrap
            else [shorten(cell, widths[column])]
            for column, cell in enumerate(row)
        ]
        for index in range(max(map(len, cells))):
            part = [lines_of[index] if index < len(lines_of) else "" for lines_of in cells]
            lines.append(_line(part, widths, right))
    return "\n".join(lines)


def _fit(widths: list[int], width: int, columns: Sequence[int]) -> None:
    """Take from the widest of these columns until the row fits or nothing more can be taken."""
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    while over > 0 and columns:
        widest = max(columns, key=lambda column: widths[column])
        if widths[widest] <= _COLUMN_MIN:
            return
        widths[widest] -= 1
        over -= 1


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    out = [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join(out).rstrip()


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
        # Cut before drawing: what is over may be many times the total.
        upto = round(width * min(edge, total) / total)
        if value > 0:
            upto = max(upto, len(cells) + 1)
        cells += mark * (upto - len(cells))
    return cells[:width].ljust(width, ".")


def printable(text: str) -> str:
    """``text`` for a terminal: control characters other than newline and tab become ``�``, so
    that no model and no file name can move the cursor or change colours."""
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text if character != "\r")


def _visible(character: str) -> str:
    # Only control characters: joiners count as unprintable, too, yet emoji are made with them.
    control = ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0
    return "�" if control and character not in "\n\t" else character
