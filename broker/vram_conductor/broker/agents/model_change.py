"""Whether a file that came back is the one that an agent's transcripts were made with (*pure*)."""

from __future__ import annotations

from vram_conductor.broker.registry import Agent
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.values import ModelInfo

MODEL_CHANGED = "model_changed"


def has_transcripts(agent: Agent) -> bool:
    """Whether any conversation has tokens."""
    return any(item.transcript for item in agent.conversations.values())


def model_changed(agent: Agent, now: ModelInfo) -> ErrorInfo | None:
    """Whether the file is another one than that which the agent's transcripts were made with:
    by its content where both digests are known, else by what else is known of it."""
    old = agent.model
    if old.digest is not None and now.digest is not None:
        same = old.digest == now.digest
    else:
        known = (old.arch, old.n_vocab, old.file_bytes)
        same = known == (now.arch, now.n_vocab, now.file_bytes)
    if same or not has_transcripts(agent):
        return None
    return ErrorInfo(
        Code.FAILED_PRECONDITION,
        MODEL_CHANGED,
        f"{now.name!r} is another file now than when agent {agent.key.agent!r} was registered; "
        "its conversations cannot go on: put the old file back, or reset them all, or "
        "unregister the agent and register it again",
        details={"arch": [old.arch, now.arch], "file_bytes": [old.file_bytes, now.file_bytes]},
    )
