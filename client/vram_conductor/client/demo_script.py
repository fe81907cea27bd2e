"""What the demo's agents are asked, and how a turn is played and shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vram_conductor.client.receipts import MARGIN, Receipts
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.requests import DecodeOptions
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.values import Usage

CODER, REVIEWER, WRITER = "coder", "reviewer", "writer"
N_CTX = 2048
MAX_TOKENS = 28
COLD = "cold"

_CODE = """Here is a Python function from our scheduler:

def pick(jobs, now, quantum):
    waiting = [j for j in jobs if not j.running and j.deadline > now]
    waiting.sort(key=lambda j: (-j.priority, j.arrived))
    running = [j for j in jobs if j.running]
    if not waiting:
        return running[0] if running else None
    best = waiting[0]
    if running and now - running[0].started < quantum:
        return running[0]
    for j in running:
        j.running = False
    best.running = True
    best.started = now
    return best

It is called at every token. The list has at most a few hundred jobs, and two callers may use it.
In two sentences: what does it do, and what could go wrong?"""
_STORY = (
    "The lighthouse keeper wrote in his diary every evening. On the last day of autumn he wrote:"
)
_CODER_TURNS = [_CODE, "Name one bug in it.", "How would you fix it?"]
_WRITER_TURNS = [_STORY, " The next morning,"]


TERMS = """\
Only one model's pool (its KV cells) fits beside the weights, so every turn swaps:
  kv_swap_evicted   whose KV, and which pool, had to leave for this turn; KV goes to shared memory
  kv_swap_restored  this agent's KV came back from there: its tokens are re-used, not computed"""


@dataclass(frozen=True)
class Turn:
    """One message to one agent; ``raw`` is text to continue, without a chat template."""

    agent: str
    text: str
    raw: bool = False


class Script:
    """Plays turns and prints what came, with a receipt line."""

    def __init__(self, conductor: Conductor, receipts: Receipts) -> None:
        self._conductor = conductor
        self._receipts = receipts

    @staticmethod
    def turns() -> Iterator[Turn]:
        """coder, writer, coder, writer, coder."""
        writer = iter(_WRITER_TURNS)
        for index, text in enumerate(_CODER_TURNS):
            yield Turn(CODER, text)
            if index < len(_WRITER_TURNS):
                yield Turn(WRITER, next(writer), raw=True)

    def play(
        self, turn: Turn, conversation: str = DEFAULT_CONVERSATION, *, quiet: bool = False
    ) -> Result:
        """Run one turn, streaming its text, greedy."""
        options: DecodeOptions = {
            "conversation": conversation,
            "max_tokens": MAX_TOKENS,
            "return_ids": True,
        }
        agent = self._conductor.agent(turn.agent)
        reply = (
            agent.decode(prompt=turn.text, continue_=True, **options)
            if turn.raw
            else agent.chat(turn.text, **options)
        )
        if quiet:
            return reply.result()
        result = self._show(turn, reply)
        self._receipts.say(f"   {_line(result.usage)}")
        return result

    def _show(self, turn: Turn, reply: Reply) -> Result:
        pieces: list[str] = []
        self._receipts.stream(f"{MARGIN}{turn.agent}> ")
        for piece in reply:
            pieces.append(piece)
            self._receipts.stream(piece.replace("\n", " "))
        self._receipts.stream("\n")
        result = reply.result()
        assert result.text == "".join(pieces), "the stream is the whole answer"
        return result

    def cold(self, results: Sequence[Result]) -> Result:
        """The coder's second turn in a conversation that has no KV: all of it is computed."""
        messages = [
            {"role": "user", "content": _CODER_TURNS[0]},
            {"role": "assistant", "content": results[0].text},
            {"role": "user", "content": _CODER_TURNS[1]},
        ]
        agent = self._conductor.agent(CODER)
        reply = agent.chat(messages, conversation=COLD, max_tokens=1)
        return reply.result()


def names(keys: Sequence[str]) -> str:
    """``local/coder/main`` → ``coder``; ``pool:…`` → ``a pool``."""
    short: list[str] = []
    for key in keys:
        if key.startswith("pool:"):
            short.append("a pool")
        else:
            parts = key.split("/")[1:] or [key]
            short.append("/".join(part for part in parts if part != DEFAULT_CONVERSATION))
    return ", ".join(short)


def _line(usage: Usage) -> str:
    parts = [
        f"{usage.prompt_tokens} prompt tokens, {usage.reused_tokens} re-used",
        f"first token {duration(usage.ttft_ms)}",
    ]
    if usage.swap.evicted:
        parts.append(f"evicted {names(usage.swap.evicted)}")
    if usage.swap.restored:
        parts.append(f"restored {size(usage.swap.bytes)} in {duration(usage.swap.ms)}")
    if usage.reprefilled_tokens:
        parts.append(f"re-prefilled {usage.reprefilled_tokens} ({usage.reprefill_reason})")
    return "(" + "; ".join(parts) + ")"
