"""Which jobs are being prepared, and what becomes of the results. Engine thread only.

The thread that prepares reads a model's vocabulary, so the model is not unloaded meanwhile; who
wants its room waits. A job may end at any time: then the result is dropped when it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vram_conductor.worker.ends import Ends
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.prepare import SEED_MAX, Task
from vram_conductor.worker.residency import Weights
from vram_conductor.worker.text import TextStream


class Preparer(Protocol):
    """Carries tasks out, elsewhere."""

    def submit(self, task: Task) -> bool:
        """Take a task; False if enough of its kind are waiting already."""
        ...

    def finished(self) -> list[Task]:
        """What has been carried out since the last call."""
        ...


class InlinePreparer:
    """Carries tasks out on the spot."""

    def __init__(self) -> None:
        self._finished: list[Task] = []

    def submit(self, task: Task) -> bool:
        task.carry_out()
        self._finished.append(task)
        return True

    def finished(self) -> list[Task]:
        done, self._finished = self._finished, []
        return done


class Preparing:
    """Hands jobs to the preparer and takes them back.

    Args:
        released: told by :meth:`release` that nothing reads a model's vocabulary any more.
        barred: whether a model's vocabulary must not be read now: it may be on its way out.
    """

    def __init__(
        self,
        preparer: Preparer,
        jobs: Jobs,
        ends: Ends,
        draw_seed: Callable[[], int],
        released: Callable[[Weights], None],
        barred: Callable[[str], bool],
    ) -> None:
        self._preparer = preparer
        self._jobs = jobs
        self._ends = ends
        self._draw_seed = draw_seed
        self._released = released
        self._barred = barred
        self._asked: dict[Task, Job] = {}
        self._free: list[Weights] = []

    def ask(self, job: Job) -> bool:
        """Have a job's prompt made, unless it is there or under way. Whether it is there now: it
        isn't where its model is not loaded, where it takes its time and where it failed."""
        weights = job.pool.weights
        wanted = job.prompt is None and job.task is None and job.verdict is None
        if wanted and not self._barred(weights.model) and weights.handle is not None:
            seed = job.run.sampling.seed
            job.seed = self._draw_seed() & SEED_MAX if seed is None else seed
            transcript = job.conversation.transcript.copy()
            task = Task(job.run, weights.handle, transcript, job.n_ctx, job.seed)
            if self._preparer.submit(task):
                job.task = task
                weights.readers += 1
                self._asked[task] = job
                self.collect()
        return job.prompt is not None

    def collect(self) -> None:
        """Take what has been carried out: jobs become ready, or end."""
        for task in self._preparer.finished():
            job = self._asked.pop(task)
            weights = job.pool.weights
            weights.readers -= 1
            if job.task is task:
                job.task = None
                self._take(job, task)
            elif task.prepared is not None:
                task.prepared.sampler.close()
            # Whoever waited for room at the preparer, or for the model's, may go on.
            self._jobs.revision += 1
            if weights.readers == 0:
                self._free.append(weights)

    def release(self) -> None:
        """Let go of models that were only kept open to be read. Not while things are moved."""
        free, self._free = self._free, []
        for weights in free:
            if weights.readers == 0:
                self._released(weights)

    def _take(self, job: Job, task: Task) -> None:
        if task.prepared is None:
            assert task.error is not None
            self._ends.failed(job, task.error)
            return
        job.conversation.transcript.take_text(task.transcript)
        job.prompt, job.sampler = task.prepared.prompt, task.prepared.sampler
        job.text = TextStream(job.run.stop)
        job.work.replace(job.prompt.ids)
