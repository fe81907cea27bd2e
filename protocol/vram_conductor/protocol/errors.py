"""The one error tree of the system.

An error is data first: a status code (the names of gRPC's canonical codes,
https://grpc.github.io/grpc/core/md_doc_statuscodes.html), a stable machine-readable
``reason``, a human ``message`` that is never parsed, and ``details`` with the numbers.
"Not now" (RESOURCE_EXHAUSTED) is a different code from "never" (OUT_OF_RANGE).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Code(StrEnum):
    """Status codes, a subset of gRPC's canonical ones."""

    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels: inside ERROR (to clients) and FAILED (to the broker).

    Attributes:
        code: status code.
        reason: stable machine-readable word, ``lower_snake`` (the ledger's refusal is the
            historical exception, ``VRAM_LEDGER_DENY``).
        message: one line for a person; says what to do next. Never parse it.
        retryable: the same request may succeed later without being changed.
        retry_after_ms: a hint, in milliseconds; None when there is none.
        details: the numbers, keyed by name with the unit last (``requested_bytes``).
    """

    code: Code
    reason: str
    message: str
    retryable: bool = False
    retry_after_ms: int | None = None
    details: dict[str, Any] = {}


class ConductorError(Exception):
    """Base of every typed error; carries the :class:`ErrorInfo`.

    Subclasses fix the code, so ``except NotFound`` works on every side of the wire.
    """

    code: Code = Code.INTERNAL

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        code: Code | None = None,
        retryable: bool = False,
        retry_after_ms: int | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.info: ErrorInfo = ErrorInfo(
            code=code or self.code,
            reason=reason,
            message=message,
            retryable=retryable,
            retry_after_ms=retry_after_ms,
            details=details,
        )

    @property
    def reason(self) -> str:
        return self.info.reason

    @property
    def details(self) -> dict[str, Any]:
        return self.info.details

    @property
    def retryable(self) -> bool:
        return self.info.retryable

    @property
    def retry_after_ms(self) -> int | None:
        return self.info.retry_after_ms

    def __str__(self) -> str:
        return f"{self.info.code} {self.info.reason}: {self.info.message}"


class Cancelled(ConductorError):
    code = Code.CANCELLED


class InvalidArgument(ConductorError):
    code = Code.INVALID_ARGUMENT


class DeadlineExceeded(ConductorError):
    code = Code.DEADLINE_EXCEEDED


class NotFound(ConductorError):
    code = Code.NOT_FOUND


class AlreadyExists(ConductorError):
    code = Code.ALREADY_EXISTS


class PermissionDenied(ConductorError):
    code = Code.PERMISSION_DENIED


class ResourceExhausted(ConductorError):
    code = Code.RESOURCE_EXHAUSTED


class LedgerDeny(ResourceExhausted):
    """REGISTER was refused by the VRAM ledger; ``details`` holds the numbers.

    Its text is one line for operators. ``retryable`` is False, and the code OUT_OF_RANGE, where
    it could not fit even on an empty device.
    """

    def __str__(self) -> str:
        return self.info.message

    @property
    def largest_n_ctx(self) -> int:
        """The largest context, in tokens, that would be admitted now; 0 if none would."""
        return int(self.info.details.get("largest_n_ctx_that_fits") or 0)


class FailedPrecondition(ConductorError):
    code = Code.FAILED_PRECONDITION


class Aborted(ConductorError):
    code = Code.ABORTED


class OutOfRange(ConductorError):
    code = Code.OUT_OF_RANGE


class Unimplemented(ConductorError):
    code = Code.UNIMPLEMENTED


class Internal(ConductorError):
    code = Code.INTERNAL


class Unavailable(ConductorError):
    code = Code.UNAVAILABLE


class DataLoss(ConductorError):
    code = Code.DATA_LOSS


class Unauthenticated(ConductorError):
    code = Code.UNAUTHENTICATED


LEDGER_DENY = "VRAM_LEDGER_DENY"
"""Reason of every refusal by the ledger."""

_BY_CODE: dict[Code, type[ConductorError]] = {
    cls.code: cls
    for cls in (
        Cancelled,
        InvalidArgument,
        DeadlineExceeded,
        NotFound,
        AlreadyExists,
        PermissionDenied,
        ResourceExhausted,
        FailedPrecondition,
        Aborted,
        OutOfRange,
        Unimplemented,
        Internal,
        Unavailable,
        DataLoss,
        Unauthenticated,
    )
}


def error_from_info(info: ErrorInfo) -> ConductorError:
    """Rebuild the typed exception for an error that arrived over the wire."""
    cls = LedgerDeny if info.reason == LEDGER_DENY else _BY_CODE.get(info.code, Internal)
    error = cls(info.reason, info.message)
    error.info = info
    return error
