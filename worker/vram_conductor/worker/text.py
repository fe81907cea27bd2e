"""From token pieces to streamed text: whole characters, stop strings held back. *Pure*.

A token's piece is bytes and may end in the middle of a character; a stop string may span
tokens. What is emitted, joined, equals what :func:`whole_text` makes of all the pieces at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class TextStream:
    """One answer, piece by piece.

    Attributes:
        stopped_by: the stop string that ended the answer, else None. Neither it nor anything
            behind it is ever emitted.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._firsts = {stop[0] for stop in self._stops}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, piece: bytes) -> str:
        """Add a piece; returns the text that can go out now, which may be empty.

        An unfinished character waits for its other bytes, the beginning of a stop string for
        what follows. Bytes that can never become a character turn into U+FFFD.
        """
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """No more pieces: returns what was held back. An unfinished character ends as U+FFFD."""
        text = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _advance(self, new: str) -> str:
        if self.stopped_by is not None:
            return ""
        window = self._held + new
        cut = first_stop(window, self._stops)
        if cut is not None:
            self.stopped_by = cut[1]
            self._held = ""
            return window[: cut[0]]
        keep = self._maybe_stop(window)
        self._held = window[keep:]
        return window[:keep]

    def _maybe_stop(self, window: str) -> int:
        """Where the longest tail begins that some stop string begins with."""
        for start, char in enumerate(window):
            if char in self._firsts:
                tail = window[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(window)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first begins, and which it is; of several that end
    at the same place the longest. This does not depend on how the text came in."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            found = (start + len(stop), start, stop)
            if best is None or found[:2] < best[:2]:
                best = found
    return None if best is None else (best[1], best[2])


def whole_text(pieces: Iterable[bytes], stops: Sequence[str] = ()) -> str:
    """The answer as it reads when it is not streamed."""
    text = b"".join(pieces).decode("utf-8", "replace")
    cut = first_stop(text, [stop for stop in stops if stop])
    return text if cut is None else text[: cut[0]]
