"""What REGISTER asks for, defaults filled in (*pure*)."""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.protocol.config import BrokerConfig
from vram_conductor.protocol.errors import AlreadyExists, ErrorInfo
from vram_conductor.protocol.messages import Register
from vram_conductor.protocol.values import AgentKey

_NOT_COMPARED = {"bare_path", "defaulted"}
"""A right of the session, and where a value came from: no parameters of the agent."""


def spec_of(message: Register, config: BrokerConfig, *, bare_path: bool) -> AgentSpec:
    """The agent that ``message`` asks for."""
    defaults = {"n_ctx": config.default_n_ctx, "kv_type": config.default_kv_type}
    defaulted = tuple(name for name in defaults if getattr(message, name) is None)
    return AgentSpec(
        model=message.model,
        n_ctx=config.default_n_ctx if message.n_ctx is None else message.n_ctx,
        kv_type=config.default_kv_type if message.kv_type is None else message.kv_type,
        device=message.device,
        slots=message.slots,
        priority=message.priority,
        sampling=message.sampling,
        ephemeral=message.ephemeral,
        ttl_s=message.ttl_s,
        linger_s=message.linger_s,
        bare_path=bare_path,
        defaulted=defaulted,
    )


def check_same(key: AgentKey, have: AgentSpec, asked: AgentSpec) -> None:
    """Whether ``asked`` is the same request again. What both left to the configuration is not
    compared: it may have been another one then, or shortened to the model's training.

    Raises:
        AlreadyExists: ``agent_exists`` with what differs, as name → [have, asked].
    """
    skipped = _NOT_COMPARED | (set(have.defaulted) & set(asked.defaulted))
    old, new = msgspec.to_builtins(have), msgspec.to_builtins(asked)
    differences: dict[str, Any] = {
        name: [old.get(name), new.get(name)]
        for name in AgentSpec.__struct_fields__
        if name not in skipped and old.get(name) != new.get(name)
    }
    if differences:
        raise AlreadyExists(
            "agent_exists",
            f"agent {key.agent!r} is registered with other parameters "
            f"({', '.join(differences)}); unregister it first, or choose another name",
            agent=key.agent,
            differences=differences,
        )


def within_training(spec: AgentSpec, error: ErrorInfo) -> AgentSpec | None:
    """``spec`` with the context that the model was trained with, where ``error`` says that a
    mere default is beyond it; None where that is not what is wrong."""
    trained = error.details.get("n_ctx_train")
    if error.reason != "n_ctx_beyond_training" or "n_ctx" not in spec.defaulted:
        return None
    if not isinstance(trained, int) or not 0 < trained < spec.n_ctx:
        return None
    return msgspec.structs.replace(spec, n_ctx=trained)
