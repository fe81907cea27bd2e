"""When jobs run out of time. *Pure.*"""

from __future__ import annotations

from vram_conductor.protocol.errors import DeadlineExceeded
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs


def next_ns(jobs: Jobs) -> int | None:
    """When the first job runs out of time, of those that have not been told to end yet."""
    times = [job.deadline_ns for job in jobs if job.deadline_ns and job.verdict is None]
    return min(times, default=None)


def overdue(jobs: Jobs, now_ns: int) -> list[Job]:
    """Jobs that have run out of time, and have not been told to end yet."""
    return [
        job
        for job in jobs
        if job.deadline_ns is not None and now_ns >= job.deadline_ns and job.verdict is None
    ]


def timed_out(job: Job, waiting: str) -> DeadlineExceeded:
    """Its error. ``waiting``: for what it waits; empty if it runs."""
    return DeadlineExceeded(
        "timeout",
        f"not finished within {job.run.timeout_ms} ms; {job.generated} tokens were "
        "generated; allow more time or ask for fewer tokens",
        timeout_ms=job.run.timeout_ms,
        generated_tokens=job.generated,
        waiting=waiting,
    )
