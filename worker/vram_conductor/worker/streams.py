"""Joins the tokens of a job into messages. *Pure.*

A message costs the worker, the broker and the client about as much as a token costs a fast device.
The first token of an answer goes out at once; what follows within a short time goes out together,
in order, and nothing stays behind when the job ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.commands import RunTokens
from vram_conductor.worker.job import Job
from vram_conductor.worker.outbox import Outbox

JOIN_TOKENS = 4
JOIN_NS = 40_000_000


@dataclass(frozen=True)
class Joining:
    """How much is joined: at most so many tokens, and nothing waits longer than this after the
    message before it. One token: nothing is joined."""

    tokens: int = 1
    wait_ns: int = JOIN_NS


class Streams:
    """What jobs have said and not sent yet."""

    def __init__(self, outbox: Outbox, joining: Joining) -> None:
        self._outbox = outbox
        self._joining = joining
        self._waiting: dict[int, Job] = {}
        self._now_ns = 0

    def tick(self, now_ns: int) -> None:
        """Time goes on: send what has waited for long enough."""
        self._now_ns = now_ns
        if self._waiting:
            for job in [job for job in self._waiting.values() if self._due_ns(job) <= now_ns]:
                self.flush(job)

    def next_ns(self) -> int | None:
        """When :meth:`tick` has something to send."""
        return min((self._due_ns(job) for job in self._waiting.values()), default=None)

    def push(self, job: Job, text: str, token: int) -> None:
        """One more token, and the text that can go out with it."""
        job.unsent_text += text
        job.unsent.append(token)
        if len(job.unsent) >= self._joining.tokens or self._due_ns(job) <= self._now_ns:
            self.flush(job)
        else:
            self._waiting[job.seq] = job

    def flush(self, job: Job, text: str = "", ids: tuple[int, ...] = ()) -> None:
        """Send what is waiting, and this; nothing is sent if there is nothing."""
        self._waiting.pop(job.seq, None)
        text, tokens = job.unsent_text + text, [*job.unsent, *ids]
        if not text and not tokens:
            return
        job.unsent_text, job.unsent = "", []
        job.sent_ns = self._now_ns
        self._outbox.reply(RunTokens, job.run, job=job.run.job, text=text, ids=tokens)

    def _due_ns(self, job: Job) -> int:
        return 0 if job.sent_ns is None else job.sent_ns + self._joining.wait_ns
