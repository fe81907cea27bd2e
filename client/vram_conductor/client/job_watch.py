"""Tells why a job does not begin: from STATUS, while its first token is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from vram_conductor.client.text import duration
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.status import JobStatus, StatusReport

FIRST_S, PERIOD_S = 0.7, 1.0
"""When to look, and how often: most jobs have begun by then, and nobody asks."""

_HINDRANCES = {
    "foreign": "device memory that other programs use",
    "worker": "its device's worker to come back",
}


def hindrance(job: JobStatus) -> str:
    """What a job waits for beside its turn, in words; empty: nothing. *Pure.*"""
    if not job.waiting:
        return ""
    kind, _, name = job.waiting.partition(":")
    what = f"the lease {name} to end" if kind == "lease" else _HINDRANCES.get(kind, job.waiting)
    until = "" if job.waiting_ms is None else f", {duration(job.waiting_ms)} at most"
    return f"waiting for {what}{until}"


class JobWatch:
    """A thread that looks now and then, until the block is left.

    Args:
        status: asks the broker; any thread.
        job: whose it is, and its number; None as long as it has none.
        tell: told whenever what the job waits for is another thing: ``job.waiting``, in words;
            empty when it waits for nothing any more.
    """

    def __init__(
        self,
        status: Callable[[], StatusReport],
        job: Callable[[], tuple[str, int] | None],
        tell: Callable[[str], None],
    ) -> None:
        self._status, self._job, self._tell = status, job, tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Does not wait for a look that is under way: the answer may never come."""
        self._over.set()

    def _run(self) -> None:
        told, delay_s = "", FIRST_S
        while not self._over.wait(delay_s):
            delay_s = PERIOD_S
            known = self._job()
            if known is None:
                continue
            try:
                jobs = self._status().jobs
            except ConductorError:
                continue  # whoever waits for the job hears of it
            mine = next((job for job in jobs if (job.principal, job.job) == known), None)
            waiting = mine.waiting if mine is not None else ""
            if waiting != told and not self._over.is_set():
                told = waiting
                self._tell(hindrance(mine) if mine is not None else "")
