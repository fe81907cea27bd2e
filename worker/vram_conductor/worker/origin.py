"""Where an exception came from, for whoever reports a bug. *Pure.*

Types, functions and lines of this program only: what an exception says may hold what users wrote.
"""

from __future__ import annotations

from types import FrameType, TracebackType

_OURS = "vram_conductor."


def origin(error: BaseException) -> dict[str, str]:
    """``error``: its type; ``at``: the innermost function of ours that it passed through, as
    ``module.function:line``; ``raised_at``: the one that raised it, if that is another. What was
    never raised has its type only."""
    found = {"error": type(error).__name__}
    innermost = ours = ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame, line = trace.tb_frame, trace.tb_lineno
        innermost = _place(frame, line)
        if str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            ours = innermost
        trace = trace.tb_next
    if ours or innermost:
        found["at"] = ours or innermost
    if ours and innermost != ours:
        found["raised_at"] = innermost
    return found


def _place(frame: FrameType, line: int) -> str:
    module = str(frame.f_globals.get("__name__", "?")).removeprefix(_OURS)
    return f"{module}.{frame.f_code.co_qualname}:{line}"
