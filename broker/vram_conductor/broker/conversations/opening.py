"""A place for a conversation (*pure*): found, or made by forgetting one that was reset."""

from __future__ import annotations

from vram_conductor.broker.journal.records import ConversationReset
from vram_conductor.broker.registry import Agent, Conversation, make_place, open_conversation
from vram_conductor.broker.state import State


def open_at(state: State, agent: Agent, name: str) -> Conversation:
    """The agent's conversation ``name``, created empty if need be.

    Raises:
        ResourceExhausted: ``too_many_conversations``.
    """
    gone = make_place(agent, name)
    if gone is not None:
        link = state.devices[agent.device].link
        if link is not None:
            link.known.pop(gone.key, None)
        state.append(ConversationReset(conversation=gone.key, version=0))
    return open_conversation(agent, name)
