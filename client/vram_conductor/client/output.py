"""Where the command line writes: tables for people, JSON for programs, news on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import msgspec

from vram_conductor.client.text import size
from vram_conductor.protocol.errors import ConductorError, LedgerDeny

_PERIOD_S = 0.1


class Output:
    """stdout for results, stderr for news and errors.

    Args:
        json: results as one JSON value; human text is not written to stdout then.
    """

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.width = shutil.get_terminal_size((100, 24)).columns
        self._drawn_s = 0.0

    def value(self, value: Any) -> None:
        """A result for programs (written only with ``--json``)."""
        if self.json:
            data = msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(value)), indent=2)
            sys.stdout.write(data.decode() + "\n")
            sys.stdout.flush()

    def text(self, text: str, end: str = "\n") -> None:
        """A result for people (not written with ``--json``)."""
        if not self.json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def news(self, text: str) -> None:
        """Something worth knowing while it happens; stderr."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def progress(self, stage: str, done: int, total: int) -> None:
        """A living line on a terminal; nothing in a log."""
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        if done < total and now - self._drawn_s < _PERIOD_S:
            return
        self._drawn_s = now
        share = 100 * done / total if total else 100
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\r{stage} {size(done)} of {size(total)} ({share:.0f} %) {end}")
        sys.stderr.flush()

    def complain(self, error: ConductorError) -> None:
        """One line for the operator; the numbers of a refusal included."""
        text = error.info.message if isinstance(error, LedgerDeny) else str(error)
        self.news(f"conductor: {text}")
        if error.retry_after_ms is not None:
            self.news(f"conductor: try again in {error.retry_after_ms} ms")
