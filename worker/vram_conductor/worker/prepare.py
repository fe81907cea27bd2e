"""Makes a job ready to run: prompt, sampler, text stream. *Pure* but for the model that it asks.

It may take long (a long text, a large template), so it is done on a thread of its own and touches
nothing of the engine's but the vocabulary, the template and the new sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import SAMPLING_DEFAULTS
from vram_conductor.worker.engine import Model, Sampler, Tokens
from vram_conductor.worker.prompt import Prompt, build_prompt
from vram_conductor.worker.transcript import Transcript, check_ids

SEED_MAX = 2**32 - 1


@dataclass(frozen=True)
class Prepared:
    """Ready to run; the sampler has seen the prompt."""

    prompt: Prompt
    sampler: Sampler


@dataclass(eq=False)
class Task:
    """One preparation.

    Attributes:
        run: the job's command.
        model: stays open until the engine thread has taken the task back.
        transcript: a copy that belongs to the task; it comes back with its text rendered.
        n_ctx: the context that the job may fill, in tokens.
        seed: for the sampler.
        wanted: the engine thread clears it when the job has ended meanwhile.
        prepared, error: what came of it; exactly one is set afterwards, none if it was unwanted.
    """

    run: Run
    model: Model
    transcript: Transcript
    n_ctx: int
    seed: int
    wanted: bool = True
    prepared: Prepared | None = None
    error: Exception | None = None

    @property
    def size(self) -> int:
        """About how much text there is to look at, in characters."""
        said = self.run.messages or ()
        new = len(self.run.prompt or "") + sum(len(message.content) for message in said)
        compares = self.run.tokens is None and not self.run.continue_
        return new + (self.transcript.unrendered if compares else 0)

    def carry_out(self) -> None:
        """Do it, on any thread. Never raises."""
        if not self.wanted:
            return
        try:
            self.prepared = prepare(self)
        except Exception as error:
            self.error = error


def prepare(task: Task) -> Prepared:
    """Build prompt and sampler.

    Raises:
        ConductorError: what ``build_prompt`` and ``Model.sampler`` raise; InvalidArgument
            ``bad_transcript``, ``bad_max_tokens``, ``bad_seed``.
    """
    run, model = task.run, task.model
    if run.max_tokens is not None and run.max_tokens < 1:
        raise InvalidArgument(
            "bad_max_tokens",
            f"max_tokens is {run.max_tokens}; it must be at least 1, or left out",
            max_tokens=run.max_tokens,
        )
    if not 0 <= task.seed <= SEED_MAX:
        raise InvalidArgument(
            "bad_seed", f"seed is {task.seed}; it is 0 to {SEED_MAX}", seed=task.seed
        )
    check_ids(task.transcript.ids.view(), model.info.n_vocab, "bad_transcript")
    prompt = build_prompt(model, task.transcript, run, task.n_ctx)
    sampling = run.sampling.over(SAMPLING_DEFAULTS)
    sampler = model.sampler(
        sampling,
        run.logit_bias,
        task.seed,
        grammar=run.grammar,
        json_schema=run.json_schema,
    )
    _accept(sampler, prompt.ids, sampling.penalty_last_n or 0)
    return Prepared(prompt, sampler)


def _accept(sampler: Sampler, ids: Tokens, last_n: int) -> None:
    """Let the penalties see as much of the prompt as they look back."""
    seen = ids if last_n < 0 else ids[len(ids) - min(last_n, len(ids)) :]
    for token in seen:
        sampler.accept(int(token))
