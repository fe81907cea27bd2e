"""``conductor explain``: what an error's reason means, and what to do about it."""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

from vram_conductor.client.output import Output
from vram_conductor.client.text import wrapped
from vram_conductor.protocol.errors import NotFound
from vram_conductor.protocol.reasons import AGAIN, Reason, codes, mentioned, near, reasons


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``explain``."""
    explain = commands.add_parser(
        "explain",
        parents=[common],
        help="what an error's reason means, and what to do",
        description="REASON is the word in parentheses at an error's end, a part of one, a code "
        "such as UNAVAILABLE, a receipt's word for why tokens were computed again, or a whole line "
        "of a log. Without it: all reasons there are.",
    )
    explain.add_argument("reason", metavar="REASON", nargs="*", help="for example no_worker")
    explain.set_defaults(run=_explain)


def _explain(args: argparse.Namespace, output: Output) -> int:
    known = reasons()
    if not args.reason:
        output.value({"reasons": list(known.values()), "codes": codes()})
        output.text(_list(known, output.width))
        return 0
    text = " ".join(args.reason)
    told = [code for code in mentioned(text, codes()) if code.lower() == text.lower()]
    if told:
        members = [reason for reason in known.values() if told[0] in reason.codes]
        output.value({"code": told[0], "meaning": codes()[told[0]], "reasons": members})
        output.text(_code(told[0], members, output.width))
        return 0
    names = mentioned(text, known)
    if not names:
        raise _unknown(text)
    output.value({"reasons": [known[name] for name in names]})
    output.text("\n\n".join(_reason(known[name], output.width) for name in names))
    return 0


def _unknown(text: str) -> NotFound:
    found = near(text, reasons())
    hint = f"near it: {', '.join(found)}" if found else "conductor explain lists all there are"
    return NotFound("no_such_reason", f"no error has the reason {text[:80]!r}; {hint}", near=found)


def _list(known: dict[str, Reason], width: int) -> str:
    parts: list[str] = []
    for group, members in groupby(known.values(), key=lambda reason: reason.group):
        parts += [f"{group}:", wrapped(" ".join(each.name for each in members), width, 2), ""]
    return "\n".join([*parts, "conductor explain REASON says what to do about one"])


def _code(code: str, members: list[Reason], width: int) -> str:
    names = " ".join(reason.name for reason in members)
    return f"{wrapped(f'{code}: {codes()[code]}', width, 0, 2)}\n{wrapped(names, width, 2)}"


def _reason(reason: Reason, width: int) -> str:
    lines = [f"{reason.name} ({reason.where})", wrapped(reason.text, width, 2)]
    if reason.retryable != "no":
        when = "" if reason.retryable == "yes" else f": {reason.retryable}"
        lines.append(wrapped(f"{AGAIN}{when}", width, 2))
    lines.append("what to do:")
    lines += [wrapped(f"- {step}", width, 2, 2) for step in reason.steps]
    return "\n".join(lines)
