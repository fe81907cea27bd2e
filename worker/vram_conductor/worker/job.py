"""One attempt of a job, from RUN to its single terminal message. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.values import StopReason, Swap, Usage
from vram_conductor.worker.engine import Sampler
from vram_conductor.worker.prepare import Task
from vram_conductor.worker.prompt import Prompt
from vram_conductor.worker.residency import Agent, Conversation, PoolState, Slot
from vram_conductor.worker.schedule import JobView
from vram_conductor.worker.tape import Tape, common_prefix
from vram_conductor.worker.text import TextStream


@dataclass
class Receipt:
    """What was done for a job besides generating; becomes ``Usage`` and ``Swap``."""

    reused_tokens: int = 0
    reprefilled_tokens: int = 0
    reprefill_reason: str = ""
    evicted: list[str] = field(default_factory=list)
    restored: bool = False
    moved_bytes: int = 0
    moved_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass
class Job:
    """A job.

    Attributes:
        run: the command.
        seq: counts jobs in order of arrival.
        waiting_ns: since when it waits: arrival, or the last preemption.
        placed_ns: since when it is in a slot.
        prompt: None until it has been prepared.
        task: its preparation, while that is under way.
        bringing_ms: what moving things for it took before it was prepared.
        work: the prompt's ids and what was generated; KV is always of a prefix of it.
        committed: a token was generated, so the conversation has become ``work``.
        slot: where it runs, None while it waits.
        held: how much of ``work`` had KV when it lost its slot.
        spreads: it ran out of cells beside others; it asks for the whole pool from now on.
        settling: it has not been in a batch since it was placed, or is catching up.
        catching_up: KV of tokens that it had already is being computed again.
        front: it waits only while its pool is reopened.
        refusals: how often the device refused to wake or to put to sleep what was moved for it.
        alone: a decode failed; it runs in batches of its own until one succeeds.
        verdict: it was told to end, and does so once nothing is under way where its KV is.
        unsent, unsent_text, sent_ns: tokens and text that wait to go out together, and when the
            last message went.
    """

    run: Run
    seq: int
    agent: Agent
    conversation: Conversation
    pool: PoolState
    waiting_ns: int
    deadline_ns: int | None = None
    placed_ns: int | None = None
    prompt: Prompt | None = None
    task: Task | None = None
    bringing_ms: float = 0.0
    work: Tape = field(default_factory=Tape)
    sampler: Sampler | None = None
    text: TextStream = field(default_factory=TextStream)
    seed: int = 0
    generated: int = 0
    announced: bool = False
    seated_once: bool = False
    committed: bool = False
    slot: Slot | None = None
    held: int = 0
    spreads: bool = False
    settling: bool = False
    catching_up: bool = False
    front: bool = False
    refusals: int = 0
    alone: bool = False
    verdict: Callable[[], None] | None = None
    unsent: list[int] = field(default_factory=list)
    unsent_text: str = ""
    sent_ns: int | None = None
    receipt: Receipt = field(default_factory=Receipt)

    @property
    def n_ctx(self) -> int:
        """The context that it may fill, in tokens."""
        return self.pool.guarantee(self.agent.n_ctx)

    @property
    def cells(self) -> int:
        """Cells that it may come to need: prompt and answer, at most ``n_ctx``."""
        if self.spreads:
            return self.pool.want.cells
        if self.prompt is None or self.run.max_tokens is None:
            return self.n_ctx
        return min(self.n_ctx, len(self.prompt.ids) + self.run.max_tokens)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        assert self.slot is not None
        return len(self.work) - len(self.slot.tape)

    @property
    def version(self) -> int:
        """The conversation's version as this attempt leaves it."""
        return self.run.version + (1 if self.committed else 0)

    def expected(self) -> int:
        """How many of the prompt's tokens should have KV already, were nothing ever lost: what
        the prompt has in common with the transcript, less its last token, which never had."""
        assert self.prompt is not None
        record = self.conversation.transcript.ids
        had = min(len(record) - 1, len(self.prompt.ids) - 1)
        return max(0, min(common_prefix(record.view(), self.prompt.ids), had))

    def view(self) -> JobView:
        """As the scheduler sees it."""
        return JobView(
            self.seq,
            self.pool.key,
            self.run.priority,
            self.waiting_ns,
            self.placed_ns,
            self.settling,
            self.front,
        )

    def leave_slot(self, now_ns: int, *, front: bool = False) -> None:
        """It waits again."""
        assert self.slot is not None
        self.held = len(self.slot.tape)
        self.slot.job = None
        self.slot = None
        self.placed_ns = None
        self.settling = self.catching_up = False
        self.waiting_ns = now_ns
        self.front = front

    def usage(self, stop_reason: StopReason) -> Usage:
        """The receipt as it stands."""
        paper = self.receipt
        return Usage(
            prompt_tokens=len(self.prompt.ids) if self.prompt else 0,
            reused_tokens=paper.reused_tokens,
            reprefilled_tokens=paper.reprefilled_tokens,
            reprefill_reason=paper.reprefill_reason if paper.reprefilled_tokens else "",
            generated_tokens=self.generated,
            stop_reason=stop_reason,
            prefill_ms=round(paper.prefill_ms, 3),
            decode_ms=round(paper.decode_ms, 3),
            state_version=self.version,
            seed=self.seed,
            swap=Swap(
                evicted=list(paper.evicted),
                restored=paper.restored,
                bytes=paper.moved_bytes,
                ms=round(paper.moved_ms, 3),
            ),
        )
