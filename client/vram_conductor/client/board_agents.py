"""Draws agents and their conversations as a table. *Pure.*"""

from __future__ import annotations

from vram_conductor.client.text import duration, plural, size, table, wrapped
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.status import AgentStatus, ConversationStatus, SweepStatus

CONVERSATIONS_SHOWN_MAX = 4
"""Per agent; the rest is counted. ``--json`` has them all."""

SWEPT_SHOWN_MAX = 3

_KV = {"slot": "in slot", "parked": "parked", "absent": "gone"}
_HEADER = ["agent", "model", "device", "state", "n_ctx", "tokens", "KV", "parked"]
_MODEL, _DEVICE, _TOKENS, _PARKED = 1, 2, 5, 7


def who(agent: str, conversation: str) -> str:
    """``coder`` for its main conversation, ``coder/plan`` for another."""
    return agent if conversation == DEFAULT_CONVERSATION else f"{agent}/{conversation}"


def render_agents(agents: list[AgentStatus], width: int = 100) -> str:
    """Agents and their conversations, in at most ``width`` columns (80 or more)."""
    if not agents:
        return "no agents; add one with: conductor register NAME --model MODEL"
    rows: list[list[str]] = []
    notes: list[str] = []
    several = len({agent.principal for agent in agents}) > 1
    for agent in agents:
        # An admin sees everybody's, and two may have the same name.
        name = f"{agent.principal}: {agent.agent}" if several else agent.agent
        rows += _rows(agent, name)
        if agent.reason is not None:
            notes.append(f"! {name} is {agent.state}: {agent.reason.message}")
    header, right = list(_HEADER), [_TOKENS, _PARKED]
    if len({agent.device for agent in agents}) == 1:
        for row in (header, *rows):
            del row[_DEVICE]
        right = [column - (column > _DEVICE) for column in right]
    drawn = table(header, rows, right=right, width=width, squeeze=(0, _MODEL))
    if any(row[-2] == _KV["absent"] for row in rows):
        notes.append("KV gone: it is computed again from the transcript when it is needed")
    return "\n".join([drawn, *(wrapped(note, width, hanging=2) for note in notes)])


def render_sweep(sweep: SweepStatus) -> str | None:
    """Which agents went by themselves; None: none did."""
    counts = {
        "with their session": sweep.session_ended,
        "whose client did not come back": sweep.not_back,
        "idle": sweep.idle,
    }
    total = sum(counts.values())
    if not total:
        return None
    why = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    shown = [
        f"{swept.agent} ({swept.reason}, {duration(swept.age_ms)} ago)"
        for swept in sweep.last[:SWEPT_SHOWN_MAX]
    ]
    last = f"; last: {', '.join(shown)}" if shown else ""
    return f"{plural(total, 'agent')} unregistered without being asked: {why}{last}"


def _rows(agent: AgentStatus, name: str) -> list[list[str]]:
    """The agent with its main conversation, then its other conversations."""
    conversations = {item.conversation: item for item in agent.conversations}
    main = conversations.pop(DEFAULT_CONVERSATION, None)
    kv_type = "" if agent.kv_type == "f16" else f" {agent.kv_type}"
    facts = [name, agent.model, agent.device, agent.state, f"{agent.n_ctx}{kv_type}"]
    known = agent.state in ("ready", "suspended")
    rows = [facts + _kv(main, known)]
    shown = list(conversations.values())[:CONVERSATIONS_SHOWN_MAX]
    rows += [["  /" + item.conversation, "", "", "", "", *_kv(item, known)] for item in shown]
    rest = list(conversations.values())[CONVERSATIONS_SHOWN_MAX:]
    if rest:
        tokens = str(sum(item.tokens for item in rest))
        parked = size(sum(item.parked_bytes for item in rest))
        more = f"  … {len(rest)} more"
        rows.append([more, "", "", "", "", tokens, "", parked])
    return rows


def _kv(conversation: ConversationStatus | None, known: bool) -> list[str]:
    """Its tokens, where its KV is, the size of its parked state. Not ``known`` before the worker
    has said what it found: what seems absent may well be there."""
    if conversation is None:
        return ["0", "-", "-"]
    where = _KV[conversation.where]
    if conversation.where == "absent" and not (known and conversation.tokens):
        where = "-"
    parked = size(conversation.parked_bytes) if conversation.parked_bytes else "-"
    return [str(conversation.tokens), where, parked]
