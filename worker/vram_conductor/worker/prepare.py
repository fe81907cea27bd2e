"""Makes a job ready to run once its model's vocabulary is there. *Pure* but for the model."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import SAMPLING_DEFAULTS
from vram_conductor.worker.engine import Sampler, Tokens
from vram_conductor.worker.job import Job
from vram_conductor.worker.prompt import build_prompt
from vram_conductor.worker.text import TextStream
from vram_conductor.worker.transcript import check_ids

SEED_MAX = 2**32 - 1


def prepare(job: Job, draw_seed: Callable[[], int]) -> None:
    """Build prompt, sampler and text stream. Does nothing where that was done.

    Raises:
        ConductorError: what ``build_prompt`` and ``Model.sampler`` raise; InvalidArgument
            ``bad_transcript``, ``bad_max_tokens``, ``bad_seed``. The conversation is unchanged.
    """
    model = job.pool.weights.handle
    assert model is not None
    if job.prompt is not None:
        return
    run = job.run
    if run.max_tokens is not None and run.max_tokens < 1:
        raise InvalidArgument(
            "bad_max_tokens",
            f"max_tokens is {run.max_tokens}; it must be at least 1, or left out",
            max_tokens=run.max_tokens,
        )
    transcript = job.conversation.transcript
    check_ids(transcript.ids.view(), model.info.n_vocab, "bad_transcript")
    prompt = build_prompt(model, transcript, run, job.n_ctx)
    sampling = run.sampling.over(SAMPLING_DEFAULTS)
    job.seed = draw_seed() & SEED_MAX if sampling.seed is None else sampling.seed
    if not 0 <= job.seed <= SEED_MAX:
        raise InvalidArgument(
            "bad_seed", f"seed is {job.seed}; it is 0 to {SEED_MAX}", seed=job.seed
        )
    job.sampler = model.sampler(sampling, run.logit_bias, job.seed)
    _accept(job.sampler, prompt.ids, sampling.penalty_last_n or 0)
    job.text = TextStream(run.stop)
    job.work.replace(prompt.ids)
    job.prompt = prompt


def _accept(sampler: Sampler, ids: Tokens, last_n: int) -> None:
    """Let the penalties see as much of the prompt as they look back."""
    seen = ids if last_n < 0 else ids[len(ids) - min(last_n, len(ids)) :]
    for token in seen:
        sampler.accept(int(token))
