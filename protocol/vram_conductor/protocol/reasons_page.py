"""Writes docs/errors.md from SPEC.md and ``advice.toml``: ``python -m
vram_conductor.protocol.reasons_page``, with ``--check`` to compare only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from vram_conductor.protocol.reasons import AGAIN, Reason, codes, reasons

PAGE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"

_HEAD = """\
# Errors, and what to do

Every error of VRAM Conductor ends with a word in parentheses, its *reason*: `(no_worker)`,
`(queue_full)`. Search this page for that word, or let the command line say the same:

```sh
conductor explain no_worker
```

It also takes a whole line of a log, and knows what is near a word that is not quite right. Before
the reason stands what happened, with its numbers: read that first. Where to look, whatever it is:

- `conductor status`: devices, who holds how many bytes, what waits for what, whether the journal is
  written.
- `conductor doctor`, on the host in question: what is installed, which devices there are, what is
  missing.
- The logs of broker and workers: below `conductor up`, or `journalctl -u vram-conductor-broker` and
  `journalctl -u 'vram-conductor-worker@*'`.
- No conversation is lost by an error of a worker, a broker or a network. `conductor history AGENT`
  shows whether a message was answered; if not, send it again. An answer that was cut off is kept as
  far as it came: ask for the rest.

Why a receipt says that tokens were computed again stands here, too, at the end:
[words of receipts](#words-of-receipts).

(This page is made from the tables in [SPEC.md](../protocol/SPEC.md#reasons) and from `advice.toml`
beside the protocol's modules: `python -m vram_conductor.protocol.reasons_page` writes it.)
"""


def render(found: Mapping[str, Reason], told: Mapping[str, str]) -> str:
    """The page, of reasons by name in their order and of what the codes tell."""
    parts = [_HEAD, "## Codes\n", "| code | what it tells | exit status of `conductor` |"]
    parts.append("| --- | --- | --- |")
    parts += [f"| {code} | {text} | {_EXIT.get(code, 1)} |" for code, text in told.items()]
    parts.append("\nThe ledger's refusal is 3, whatever its code.\n")
    for group, members in groupby(found.values(), key=lambda reason: reason.group):
        parts.append(f"## {group}\n")
        parts += [_section(reason) for reason in members]
    return "\n".join(parts).rstrip("\n") + "\n"


_EXIT = {
    "NOT_FOUND": 4,
    "ALREADY_EXISTS": 5,
    "UNAVAILABLE": 6,
    "DEADLINE_EXCEEDED": 6,
    "RESOURCE_EXHAUSTED": 7,
    "INVALID_ARGUMENT": 8,
    "OUT_OF_RANGE": 8,
    "PERMISSION_DENIED": 9,
    "UNAUTHENTICATED": 9,
}
"""As the command line's ``--help`` has them; 1 for the rest."""


def _section(reason: Reason) -> str:
    meaning = reason.meaning.replace("](#", "](../protocol/SPEC.md#")
    head = f"### `{reason.name}`\n\n{reason.where}{_again(reason)}: {meaning}\n\n"
    return head + "".join(f"- {step}\n" for step in reason.steps)


def _again(reason: Reason) -> str:
    if reason.retryable == "no":
        return ""
    return f" ({AGAIN}{'' if reason.retryable == 'yes' else f', {reason.retryable}'})"


def main(arguments: list[str] | None = None) -> int:
    """0: written, or up to date. 1: ``--check`` found a difference."""
    parser = argparse.ArgumentParser(prog="reasons_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/errors.md")
    options = parser.parse_args(arguments)
    text = render(reasons(), codes())
    if not options.check:
        options.page.write_text(text, "utf-8")
        return 0
    if options.page.exists() and options.page.read_text("utf-8") == text:
        return 0
    sys.stderr.write(
        f"{options.page} differs from SPEC.md and advice.toml; write it anew: "
        "python -m vram_conductor.protocol.reasons_page\n"
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
