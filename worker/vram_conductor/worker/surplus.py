"""Which parked states make room for another one, where the store is full. *Pure.*

An agent is promised room for its largest state; its conversations may together take more while
nobody needs it. An agent's most recently used states are within its promise, as many as fit; the
others are surplus. The agent that parks gives up its own surplus first, so that many conversations
of one agent cost that one; then everybody's surplus goes, and at last its own other states. What
others were promised never does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vram_conductor.protocol.values import AgentKey, ConversationKey

Parked = tuple[ConversationKey, int]
"""A conversation and the bytes that its state takes."""


def short_bytes(details: Mapping[str, Any]) -> int:
    """How many bytes ``arena_full`` or ``disk_full`` lacked, at least 1."""
    if "free_bytes" in details:
        missing = details["need_bytes"] - details["free_bytes"]
    else:
        missing = details["need_bytes"] + details["used_bytes"] - details["capacity_bytes"]
    return max(1, int(missing))


def victims(
    writer: ConversationKey,
    need_bytes: int,
    parked: Sequence[Parked],
    promised: Mapping[AgentKey, int],
    short_by_bytes: int,
) -> list[ConversationKey]:
    """States to give up, so that at least ``short_by_bytes`` are freed; none if that is not
    possible, and never more than are needed.

    Args:
        writer: whose state is to be written; what it has parked now stays.
        need_bytes: size of that state.
        parked: all states, least recently used first.
        promised: bytes for each admitted agent's states.
    """
    left = dict(promised)
    own = writer.agent_key
    left[own] = left.get(own, 0) - need_bytes
    ranks: tuple[list[Parked], list[Parked], list[Parked]] = ([], [], [])
    for key, size in reversed(parked):
        if key == writer:
            continue
        agent = key.agent_key
        within = size <= left.get(agent, 0)
        if within:
            left[agent] -= size
        if agent == own:
            ranks[2 if within else 0].insert(0, (key, size))
        elif not within:
            ranks[1].insert(0, (key, size))
    return _enough([item for rank in ranks for item in rank], short_by_bytes)


def _enough(candidates: list[Parked], short_by_bytes: int) -> list[ConversationKey]:
    chosen: list[Parked] = []
    freed = 0
    for item in candidates:
        if freed >= short_by_bytes:
            break
        chosen.append(item)
        freed += item[1]
    if freed < short_by_bytes:
        return []
    # A late, large one may have made early ones needless: spare the last of those first.
    for item in reversed(chosen[:-1]):
        if freed - item[1] >= short_by_bytes:
            chosen.remove(item)
            freed -= item[1]
    return [key for key, _ in chosen]
