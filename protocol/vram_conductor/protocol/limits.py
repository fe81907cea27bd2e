"""Every limit of the protocol, as named constants (units last in the name).

The broker announces the ones that a client can hit in ``WELCOME.limits``.
"""

from __future__ import annotations

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
PREAMBLE = b"VMC" + bytes([PROTOCOL_MAJOR])
"""First frame of every message."""

FRAME_BYTES_MAX = 8 * 1024 * 1024
"""ZMQ_MAXMSGSIZE on every socket; libzmq applies it per frame."""

FRAMES_MAX = 4
"""Preamble, map, and at most two raw buffers; more frames are dropped unread."""

MAP_BYTES_MAX = 8 * 1024 * 1024
"""The msgpack map. The longest prompt (4 bytes a character) and the most prompt tokens (5 bytes
an id) fit; the token ids of a transcript travel outside it, as a raw buffer."""

NESTING_MAX = 16
"""Depth of ``OK.body`` and ``details``, the only fields without a schema."""

NAME_CHARS_MAX = 64
"""Agents, conversations, devices, principals, leases: letters, digits and ``._:@-``, the first
one a letter or digit. No slash: ``principal/agent/conversation`` stays unambiguous."""

MODEL_CHARS_MAX = 1_024
"""A model's name or path."""

ROLE_CHARS_MAX = 64
CLIENT_CHARS_MAX = 128
FEATURES_MAX = 64
RID_BYTES = 16
PROMPT_CHARS_MAX = 2_000_000
"""Of one DECODE: the prompt, or all roles and contents together."""

MESSAGES_MAX = 4096
PROMPT_TOKENS_MAX = 1_048_576
MAX_TOKENS_MAX = 1_048_576
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256
LOGIT_BIAS_MAX = 1024
GRAMMAR_BYTES_MAX = 64 * 1024
"""A grammar's text, one that was made of a JSON schema, too; and a schema, written as JSON."""

SCHEMA_NESTING_MAX = 64
"""Depth of DECODE.json_schema."""

TOKEN_ID_MAX = 2**31 - 1
N_CTX_MAX = 2_097_152
"""A transcript of this length is one raw frame."""

SLOTS_MAX = 64
PRIORITY_MAX = 100
"""Priorities run from minus this to this."""

TEMPERATURE_MAX = 100.0
REPEAT_PENALTY_MAX = 100.0
PENALTY_MAX = 2.0
"""presence_penalty and frequency_penalty: from minus this to this."""

BIAS_MAX = 1_000.0
"""logit_bias: from minus this to this; -1000 forbids a token in practice."""

SEED_MAX = 2**32 - 1
SEQ_MAX = 2**31 - 1
VERSION_MAX = 2**63 - 1
TIME_MS_MAX = 7 * 24 * 3_600_000
TTL_S_MAX = 366 * 24 * 3_600
LINGER_S_MAX = 24 * 3_600
COME_BACK_MS = 30_000
"""After a restart of the broker ephemeral agents wait for so long for one of their clients."""

LEASE_TTL_S_MAX = 3_600
"""Agents wait while a lease is held: a holder that dies frees them within this time. One that
lives renews."""

LEASES_MAX = 256
LEASES_PER_PRINCIPAL_MAX = 16

AGENTS_MAX = 10_000
AGENTS_PER_PRINCIPAL_MAX = 1_000
CONVERSATIONS_PER_AGENT_MAX = 256
HISTORY_BYTES_MAX = 4 * 1024 * 1024
"""What is kept of a conversation's turns as text (UTF-8, and 64 bytes per turn)."""

TURN_BYTES_MAX = 1024 * 1024
"""The text of one turn; of a longer one only the token ids are kept."""

HISTORY_PAGE_BYTES_MAX = 1024 * 1024
"""Text in one answer to HISTORY, as :data:`HISTORY_BYTES_MAX` counts, but for a single turn."""

HISTORY_PAGE_TOKENS_MAX = 65_536
DEVICES_MAX = 64
"""Devices that workers may bring where none is configured: what they name is kept for good."""
SESSIONS_MAX = 4_096
SESSIONS_PER_KEYED_PRINCIPAL_MAX = 1_024
"""So that no tenant takes the places of all others."""

QUEUED_JOBS_MAX = 1_024
QUEUED_JOBS_PER_AGENT_MAX = 64
STREAM_BYTES_MAX = 16 * 1024 * 1024
"""Buffered output of one job (text and ids); a reply that outgrows it ends as ``length``."""

RESULT_KEEP_MS = 300_000
"""How long a finished stream can still be resumed."""

ORPHAN_MS = 10_000
"""How long a running stream outlives its lost session, where the client may come back."""

RESUME_MS = 10_000
"""How long a worker that lost its connection is waited for, with what it was doing."""

HEARTBEAT_MS = 2_000
MISSED_HEARTBEATS_MAX = 3
HELLO_TIMEOUT_MS = 5_000

N_CTX_PAD = 256
"""llama.cpp pads KV caches to this many cells; the ledger counts the same way."""

BYTES_MAX = 1 << 62
"""Above any real memory; arithmetic on byte counts stays within 64 bits."""

DEFAULT_CONVERSATION = "main"
