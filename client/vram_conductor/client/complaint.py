"""An error as the command line says it: what went wrong, then what to type. *Pure.*"""

from __future__ import annotations

from typing import Any

from vram_conductor.client.text import duration
from vram_conductor.protocol.errors import ConductorError, LedgerDeny
from vram_conductor.protocol.plain import is_list, is_map


def explain(error: ConductorError, command: str = "", whom: str = "AGENT") -> list[str]:
    """One line with the message and its reason; perhaps more with what to do after ``command``,
    which concerned ``whom``, an agent and perhaps its conversation.

    The ledger's refusal is its own one line, for operators and their scripts.
    """
    info = error.info
    lines = [info.message if isinstance(error, LedgerDeny) else f"{info.message} ({info.reason})"]
    kept = _kept(info.details)
    hint = _go_on(command, whom) if kept else _hint(info.reason, info.details, command, whom)
    if hint:
        lines.append(hint)
    # What was half said would be answered a second time.
    if info.retry_after_ms is not None and not kept:
        lines.append(f"try again in {duration(info.retry_after_ms)}")
    return lines


def _kept(details: dict[str, Any]) -> bool:
    """Whether the message and a part of its answer are in the conversation."""
    tokens = details.get("generated_tokens")
    return isinstance(tokens, int) and tokens > 0


def _go_on(command: str, whom: str) -> str:
    if command == "chat":
        return "the answer so far is kept; ask it to go on, do not send the message again"
    go_on = f'conductor decode {whom} "Go on."'
    return f"the answer so far is kept: conductor history {whom}; continue it: {go_on}"


def _hint(reason: str, details: dict[str, Any], command: str, whom: str) -> str:
    """What to type; empty where the message says it."""
    agent = details.get("agent", "NAME")
    match reason:
        case "no_such_agent" if command in ("unregister", "reset", "fork", "history"):
            return "see: conductor list"
        case "no_such_agent":
            return f"see: conductor list; add it: conductor register {agent} --model MODEL"
        case "agent_exists":
            return f"{_differences(details)}remove it first: conductor unregister {agent}"
        case "lease_exists":
            return f"{_differences(details)}end it first: conductor lease NAME --release"
        case "no_such_lease":
            return "see: conductor status"
        case "no_chat_template":
            return f"send plain text to continue: conductor decode --raw {whom} TEXT"
        case "prompt_too_long" if command == "chat":
            return "/reset forgets the conversation"
        case "prompt_too_long" | "context_full":
            return f"forget the conversation: conductor reset {whom}"
        case "worker_missing":
            return "see: conductor doctor"
        case _:
            return ""


def _given(name: str, value: Any) -> str:
    """A parameter's value; None where it was left to the broker."""
    if value is None:
        return "not given (best fit)" if name == "device" else "not given"
    return str(value)


def _differences(details: dict[str, Any]) -> str:
    given = details.get("differences")
    if not is_map(given):
        return ""
    pairs = [
        f"{name} is {_given(name, value[0])}, not {_given(name, value[1])}"
        for name, value in given.items()
        if is_list(value) and len(value) == 2
    ]
    return f"{', '.join(pairs)}; " if pairs else ""
