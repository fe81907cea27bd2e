"""The client library of VRAM Conductor.

>>> from vram_conductor.client import Conductor, LedgerDeny
>>> with Conductor() as conductor:
...     try:
...         coder = conductor.register("coder", "smollm2-135m", n_ctx=1024)
...     except LedgerDeny as deny:
...         print(deny)
...     with coder.chat("Count to three.", max_tokens=16) as reply:
...         for piece in reply:
...             print(piece, end="")
one, two, three.

``AsyncConductor`` is the same for asyncio. Every error is a ``ConductorError`` with a stable
``reason``, ``details`` with the numbers, ``retryable`` and ``retry_after_ms``.
"""

from __future__ import annotations

from vram_conductor.client.agent import Agent
from vram_conductor.client.aio import AsyncConductor
from vram_conductor.client.aio_agent import AsyncAgent
from vram_conductor.client.aio_lease import AsyncLease
from vram_conductor.client.aio_reply import AsyncReply
from vram_conductor.client.effects import News, Queued
from vram_conductor.client.history import History
from vram_conductor.client.lease import Lease
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.requests import (
    DecodeOptions,
    LeaseOptions,
    RegisterOptions,
    SamplingOptions,
)
from vram_conductor.client.sync import Conductor
from vram_conductor.protocol.conversations import ForkReceipt, Turn
from vram_conductor.protocol.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    Code,
    ConductorError,
    DataLoss,
    DeadlineExceeded,
    ErrorInfo,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LedgerDeny,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from vram_conductor.protocol.status import AgentStatus, LeaseStatus, StatusReport
from vram_conductor.protocol.values import Message, Sampling, Swap, Usage

__all__ = [
    "Aborted",
    "Agent",
    "AgentStatus",
    "AlreadyExists",
    "AsyncAgent",
    "AsyncConductor",
    "AsyncLease",
    "AsyncReply",
    "Cancelled",
    "Code",
    "Conductor",
    "ConductorError",
    "DataLoss",
    "DeadlineExceeded",
    "DecodeOptions",
    "ErrorInfo",
    "FailedPrecondition",
    "ForkReceipt",
    "History",
    "Internal",
    "InvalidArgument",
    "Lease",
    "LeaseOptions",
    "LeaseStatus",
    "LedgerDeny",
    "Message",
    "News",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "Queued",
    "RegisterOptions",
    "Reply",
    "ResourceExhausted",
    "Result",
    "Sampling",
    "SamplingOptions",
    "StatusReport",
    "Swap",
    "Turn",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
]
