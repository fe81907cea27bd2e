"""Sessions of clients (*pure*): HELLO to BYE, or to silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from vram_conductor.broker.ledger.decisions import LeaseKey
from vram_conductor.protocol import limits, structure
from vram_conductor.protocol.config import BrokerConfig
from vram_conductor.protocol.errors import FailedPrecondition, ResourceExhausted
from vram_conductor.protocol.keys import Role
from vram_conductor.protocol.liveness import Liveness
from vram_conductor.protocol.values import AgentKey

FEATURES = [
    "credit",
    "resume",
    "cancel",
    "detach",
    "lease",
    "linger",
    "conversations",
    structure.FEATURE,
]

Leave = Literal["bye", "revoked", "dead", "lost"]
"""How a session ends: BYE; its key was revoked; the client's process has ended; anything else, so
that the client may come back."""


@dataclass(slots=True)
class Session:
    """One connected client.

    Attributes:
        jobs: numbers of the jobs whose output it receives.
        ephemeral: agents that go when it ends. ``leases``: leases that do.
        behind: it does not read as fast as it is sent to.
        role: what it may do; may change with the list of keys.
        key: the public half of its key; empty where it needs none.
    """

    peer: bytes
    session: str
    principal: str
    same_user_ipc: bool
    liveness: Liveness
    jobs: set[int] = field(default_factory=set)
    ephemeral: set[AgentKey] = field(default_factory=set)
    leases: set[LeaseKey] = field(default_factory=set)
    behind: bool = False
    role: Role = "owner"
    key: str = ""


class Sessions:
    """All sessions, by peer."""

    def __init__(self, broker_epoch: int) -> None:
        self._sessions: dict[bytes, Session] = {}
        self._per_principal: Counter[str] = Counter()
        self._prefix = f"{broker_epoch:x}"
        self._last = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find(self, peer: bytes) -> Session | None:
        return self._sessions.get(peer)

    def get(self, peer: bytes) -> Session:
        """Raises FailedPrecondition ``no_session``."""
        session = self._sessions.get(peer)
        if session is None:
            raise FailedPrecondition(
                "no_session",
                "this connection has no session: say HELLO first (again, if the broker restarted)",
                retryable=True,
            )
        return session

    def open(
        self, peer: bytes, principal: str, same_user_ipc: bool, liveness: Liveness, key: str = ""
    ) -> Session:
        """A new session, or the one that the peer has already.

        Raises ResourceExhausted ``too_many_sessions``.
        """
        known = self._sessions.get(peer)
        if known is not None:
            return known
        _check_room("the broker has", len(self._sessions), limits.SESSIONS_MAX)
        if key:
            mine = self._per_principal[principal]
            _check_room(f"{principal} has", mine, limits.SESSIONS_PER_KEYED_PRINCIPAL_MAX)
        self._last += 1
        session = Session(
            peer, f"{self._prefix}-{self._last}", principal, same_user_ipc, liveness, key=key
        )
        self._sessions[peer] = session
        self._per_principal[principal] += 1
        return session

    def close(self, peer: bytes) -> Session | None:
        """Forget a session; None if there was none."""
        session = self._sessions.pop(peer, None)
        if session is not None:
            self._per_principal[session.principal] -= 1
            if not self._per_principal[session.principal]:
                del self._per_principal[session.principal]
        return session


def _check_room(who: str, sessions: int, limit: int) -> None:
    """Raises ResourceExhausted ``too_many_sessions``."""
    if sessions >= limit:
        raise ResourceExhausted(
            "too_many_sessions",
            f"{who} {sessions} sessions, the limit is {limit}; close some or try again later",
            retryable=True,
            retry_after_ms=limits.HEARTBEAT_MS * limits.MISSED_HEARTBEATS_MAX,
            sessions=sessions,
            limit=limit,
        )


def announced_limits(config: BrokerConfig) -> dict[str, int]:
    """WELCOME.limits: what a client can hit."""
    return {
        "map_bytes_max": limits.MAP_BYTES_MAX,
        "frame_bytes_max": limits.FRAME_BYTES_MAX,
        "name_chars_max": limits.NAME_CHARS_MAX,
        "prompt_chars_max": limits.PROMPT_CHARS_MAX,
        "prompt_tokens_max": limits.PROMPT_TOKENS_MAX,
        "messages_max": limits.MESSAGES_MAX,
        "max_tokens_max": limits.MAX_TOKENS_MAX,
        "stop_strings_max": limits.STOP_STRINGS_MAX,
        "stop_string_chars_max": limits.STOP_STRING_CHARS_MAX,
        "logit_bias_max": limits.LOGIT_BIAS_MAX,
        "grammar_bytes_max": limits.GRAMMAR_BYTES_MAX,
        "schema_nesting_max": limits.SCHEMA_NESTING_MAX,
        "n_ctx_max": limits.N_CTX_MAX,
        "slots_max": limits.SLOTS_MAX,
        "agents_per_principal_max": limits.AGENTS_PER_PRINCIPAL_MAX,
        "conversations_per_agent_max": limits.CONVERSATIONS_PER_AGENT_MAX,
        "queued_jobs_max": config.queued_jobs_max,
        "queued_jobs_per_agent_max": config.queued_jobs_per_agent_max,
        "stream_bytes_max": limits.STREAM_BYTES_MAX,
        "result_keep_ms": config.result_keep_ms,
        "orphan_ms": orphan_ms(config, "lost"),
        "lease_ttl_s_max": limits.LEASE_TTL_S_MAX,
        "leases_per_principal_max": limits.LEASES_PER_PRINCIPAL_MAX,
    }


def orphan_ms(config: BrokerConfig, how: Leave) -> int:
    """How long a running job outlives its session; 0: not at all."""
    if how in ("bye", "revoked"):
        return 0
    if config.orphan_ms is not None:
        return config.orphan_ms
    return 0 if how == "dead" else limits.ORPHAN_MS
