"""Turns of agents that take each other's place, beside turns of an agent that is there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vram_conductor.client.bench_bed import Bed, Turn, token_ids
from vram_conductor.client.bench_report import median, percentile
from vram_conductor.protocol.values import MoveRate

THINK_S = 0.02
"""Between two turns: what ends one is written down beside it, as in a conversation."""

BACKED_UP_S = 9.0
CALM_S = 1.5
"""A worker makes such copies when nothing has happened for a second."""

_REPLY_TOKENS = 2


@dataclass
class Pair:
    """Times of one agent: right after another's turn, and right after its own."""

    switched: list[Turn] = field(default_factory=list)
    resident: list[Turn] = field(default_factory=list)

    @property
    def extra_ms(self) -> float:
        """Median time to first token of a switch, over that of a resident agent."""
        return median(self._ms(self.switched)) - median(self._ms(self.resident))

    @property
    def resident_ms(self) -> float:
        return median(self._ms(self.resident))

    @property
    def p95_ms(self) -> float:
        """Of a switch, over the resident median."""
        return percentile(self._ms(self.switched), 0.95) - self.resident_ms

    @property
    def moved_ms(self) -> float:
        """Median of what the worker says that its moves took."""
        return median([turn.usage.swap.ms for turn in self.switched])

    @property
    def computed_ms(self) -> float:
        """Median of what computing a resident agent's prompt took, as the worker says."""
        return median([turn.usage.prefill_ms for turn in self.resident])

    @property
    def tokens(self) -> float:
        """Median length of what was switched to."""
        return median([turn.usage.prompt_tokens for turn in self.switched])

    def _ms(self, turns: Sequence[Turn]) -> list[float]:
        return [turn.ttft_ms for turn in turns]

    def plain(self) -> dict[str, object]:
        """For the JSON. ``parts`` of the times to first token: receipt by the broker to STARTED
        (moves included), computing the prompt, receipt to the first token."""
        return {
            "switched_ms": [round(turn.ttft_ms, 3) for turn in self.switched],
            "resident_ms": [round(turn.ttft_ms, 3) for turn in self.resident],
            "parts": {
                name: {
                    part: [round(getattr(turn.usage, part), 3) for turn in turns]
                    for part in ("queue_ms", "prefill_ms", "ttft_ms")
                }
                for name, turns in (("switched", self.switched), ("resident", self.resident))
            },
            "swap_ms": [round(turn.usage.swap.ms, 3) for turn in self.switched],
            "swap_bytes": [turn.usage.swap.bytes for turn in self.switched],
            "evicted": [turn.usage.swap.evicted for turn in self.switched[-2:]],
            "reprefilled": sum(turn.usage.reprefilled_tokens for turn in self.switched),
        }


def fill(bed: Bed, agent: str, tokens: int, conversation: str = "main") -> None:
    """A fresh conversation of so many tokens."""
    bed.conductor.reset(agent, conversation)
    prompt = token_ids(tokens, seed=len(agent))
    bed.turn(agent, prompt, max_tokens=_REPLY_TOKENS, conversation=conversation)


def short_turn(bed: Bed, agent: str, index: int) -> Turn:
    """One more token for the conversation, and the beginning of a reply."""
    return bed.turn(agent, token_ids(1, seed=index), max_tokens=_REPLY_TOKENS)


def warm_up(bed: Bed, agents: Sequence[str]) -> None:
    """Take turns until every model that can sleep has its copy in host memory: it is made once,
    beside the first turns, and is no part of a switch."""
    until = time.monotonic() + BACKED_UP_S
    wanted = {f"pinned:{bed.agent(agent).model_id}" for agent in agents}
    for index in itertools.count():
        for agent in agents:
            short_turn(bed, agent, index)
            bed.pause(THINK_S)
        status = bed.status()
        pinned = {line.key for line in status.parked}
        sleeps = status.worker is not None and status.worker.mechanism == "vmm-sleep"
        if not sleeps or wanted <= pinned or time.monotonic() > until:
            return
        bed.pause(CALM_S)


def alternate(bed: Bed, agents: Sequence[str], rounds: int) -> dict[str, Pair]:
    """Every round each agent takes the device over, then has a second turn where it is."""
    pairs = {agent: Pair() for agent in agents}
    for index in range(rounds + 1):
        for agent in agents:
            bed.pause(THINK_S)
            switched = short_turn(bed, agent, index)
            bed.pause(THINK_S)
            resident = short_turn(bed, agent, index)
            if index > 0:  # the first round warms up
                pairs[agent].switched.append(switched)
                pairs[agent].resident.append(resident)
    return pairs


def between(before: dict[str, MoveRate], after: dict[str, MoveRate]) -> dict[str, MoveRate]:
    """What moved between two readings; kinds that did not are absent. *Pure.*"""
    found: dict[str, MoveRate] = {}
    for kind, now in after.items():
        then = before.get(kind, MoveRate())
        if now.count > then.count:
            found[kind] = MoveRate(
                count=now.count - then.count,
                bytes=now.bytes - then.bytes,
                ms=now.ms - then.ms,
                last_bytes=now.last_bytes,
                last_ms=now.last_ms,
            )
    return found


def gb_s(rate: MoveRate | None) -> float | None:
    """1e9 bytes per second; None if nothing moved."""
    return rate.bytes / rate.ms / 1e6 if rate is not None and rate.ms > 0 else None
