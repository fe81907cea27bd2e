"""A deny in words and as an error. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.decisions import Deny, DenyCode
from vram_conductor.broker.ledger.tenants import own_lines
from vram_conductor.protocol.errors import LEDGER_DENY, Code, ErrorInfo
from vram_conductor.protocol.values import Line

LINES_MAX = 64
"""Lines in an error's details: the largest, and one that sums up the others."""

SAMPLE_RETRY_MS = 2_000
"""When a new memory sample can be expected."""

INT64_MAX = (1 << 63) - 1

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def human_bytes(count: int, gap: str = " ") -> str:
    """``1610612736`` → ``1.50 GiB``: whole where it is whole, else three digits or more."""
    if count < 0:
        return f"-{human_bytes(-count, gap)}"
    power = min(max(0, count.bit_length() - 1) // 10, len(_UNITS) - 1)
    unit = 1 << (10 * power)
    if count % unit == 0:
        return f"{count // unit}{gap}{_UNITS[power]}"
    size = count / unit
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{digits}f}{gap}{_UNITS[power]}"


def hint(deny: Deny) -> str:
    """One sentence or two that tell the operator what to do next, with numbers."""
    match deny.code:
        case DenyCode.CAP | DenyCode.MEASURED:
            return _hint_bytes(deny)
        case DenyCode.HOST:
            return _hint_host(deny)
        case DenyCode.FILE:
            return (
                f"the model file alone has {human_bytes(deny.requested_bytes)}, {deny.device} "
                f"may hand out {human_bytes(deny.ledger_max_bytes)}: choose a smaller "
                "quantisation or model, or a larger device"
            )
        case DenyCode.NO_ESTIMATE:
            return (
                f"nothing is loaded without an estimate ({deny.note}): check the file with "
                "'conductor models verify', or choose another model, n_ctx or kv_type"
            )
        case DenyCode.STALE_SAMPLE:
            return f"{deny.note}: look at the worker with 'conductor status', then try again"
        case DenyCode.NO_DEVICE:
            return f"{deny.note}: see 'conductor status' for the devices, or start its worker"
        case DenyCode.AGENTS:
            return f"{deny.note}: unregister agents that are no longer used"


def _hint_bytes(deny: Deny) -> str:
    short = human_bytes(deny.short_by_bytes)
    start = "it is larger than its estimate; " if deny.code is DenyCode.MEASURED else ""
    lease = deny.code is DenyCode.CAP and deny.claim is None
    ways: list[str] = []
    if deny.largest_n_ctx_that_fits:
        ways.append(f"register with n_ctx={deny.largest_n_ctx_that_fits}, which fits now")
    if deny.never:
        what = f"n_ctx={deny.claim.n_ctx}" if deny.claim else deny.note or "it"
        most = human_bytes(deny.ledger_max_bytes)
        start += f"{what} never fits: {deny.device} may hand out {most} in all; "
        if not ways:
            ways.append("ask for less" if lease else "choose a smaller model or context")
    else:
        if lease and deny.agents and _agents_bytes(deny) >= deny.short_by_bytes:
            ways.append("let agents make room (park, without --no-park)")
        ways += _room(deny)
    if not ways or deny.never:
        ways.append(f"raise the capacity of {deny.device} by {short}")
    if deny.admission_percent < 100:
        ways.append(f"raise admission_percent, now {deny.admission_percent}")
    return start + ", or ".join(ways)


def _agents_bytes(deny: Deny) -> int:
    return deny.ledger_allocated_bytes - deny.leases_bytes


def _room(deny: Deny) -> list[str]:
    """Who could give bytes back: each a way of its own, or where no one has enough, all in one."""
    held_bytes = _agents_bytes(deny)
    found: list[tuple[int, str]] = []
    if deny.foreign_bytes:
        foreign = human_bytes(deny.foreign_bytes)
        text = f"stop other programs, which use {foreign} of {deny.device}"
        found.append((deny.foreign_bytes, text))
    if deny.leases_bytes:
        leased = human_bytes(deny.leases_bytes)
        text = f"release leases or wait for their end (they hold {leased})"
        found.append((deny.leases_bytes, text))
    if deny.agents:
        held, short = human_bytes(held_bytes), human_bytes(deny.short_by_bytes)
        who = "1 agent holds" if deny.agents == 1 else f"{deny.agents} agents hold"
        until = f" until {short} are free" if held_bytes >= deny.short_by_bytes else ""
        found.append((held_bytes, f"unregister agents{until} ({who} {held})"))
    texts = [text for _, text in found]
    if any(has >= deny.short_by_bytes for has, _ in found) or not texts:
        return texts
    return [", and ".join(texts)]


def _hint_host(deny: Deny) -> str:
    ways: list[str] = []
    if deny.largest_n_ctx_that_fits:
        ways.append(f"register with n_ctx={deny.largest_n_ctx_that_fits}, which fits now")
    cap, short = human_bytes(deny.ledger_max_bytes), human_bytes(deny.short_by_bytes)
    ways.append(f"raise host_cap of {deny.device}, now {cap}, by {short}")
    if not deny.never:
        ways.append("unregister agents")
    state = human_bytes(deny.requested_bytes)
    return f"parking its state takes {state} of host memory: " + ", or ".join(ways)


def line(deny: Deny) -> str:
    """``VRAM_LEDGER_DENY code=CAP device=… requested=… … hint="…"``: one line for people.
    Numbers of bytes stand there if they were the reason."""
    largest = deny.largest_n_ctx_that_fits
    words = [LEDGER_DENY, f"code={deny.code}"]
    if deny.device:
        words.append(f"device={deny.device}")
    if deny.about_bytes:
        words += [
            f"requested={human_bytes(deny.requested_bytes, '')}",
            f"allocated={human_bytes(deny.ledger_allocated_bytes, '')}",
            f"foreign={human_bytes(deny.foreign_bytes, '')}",
            f"max={human_bytes(deny.ledger_max_bytes, '')}",
            f"short_by={human_bytes(deny.short_by_bytes, '')}",
            *([] if largest is None else [f"largest_n_ctx={largest}"]),
        ]
    quoted = " ".join(hint(deny).replace('"', "'").split())
    return " ".join(words) + f' hint="{quoted}"'


def error(refusal: Refusal | Deny, principal: str | None = None) -> ErrorInfo:
    """The wire error: reason ``VRAM_LEDGER_DENY``, exact bytes in ``details``. It is told to
    ``principal``: other principals' agents are not named.

    RESOURCE_EXHAUSTED (retryable) where it could fit later; OUT_OF_RANGE where it can never
    fit, on no device, even if all else left.
    """
    denies = refusal.denies if isinstance(refusal, Refusal) else (refusal,)
    first = refusal.closest if isinstance(refusal, Refusal) else refusal
    details = {**_numbers(first), "lines": _lines(own_lines(first.lines, principal))}
    if len(denies) > 1:
        details["devices"] = [_numbers(deny) for deny in denies]
    code = Code.RESOURCE_EXHAUSTED
    if all(deny.never for deny in denies):
        code = Code.OUT_OF_RANGE
    return ErrorInfo(
        code=code,
        reason=LEDGER_DENY,
        message=line(first),
        retryable=code is Code.RESOURCE_EXHAUSTED,
        retry_after_ms=SAMPLE_RETRY_MS if first.code is DenyCode.STALE_SAMPLE else None,
        details=details,
    )


def _numbers(deny: Deny) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "code": str(deny.code),
        "device": deny.device,
        "ledger_max_bytes": deny.ledger_max_bytes,
        "ledger_allocated_bytes": deny.ledger_allocated_bytes,
        "requested_bytes": deny.requested_bytes,
        "foreign_bytes": deny.foreign_bytes,
        "short_by_bytes": deny.short_by_bytes,
        "largest_n_ctx_that_fits": deny.largest_n_ctx_that_fits,
        "never_fits": deny.never,
        "agents": deny.agents,
        "leases_bytes": deny.leases_bytes,
        "hint": hint(deny),
    }
    claim = deny.claim
    if claim:
        numbers |= {
            "model": claim.model,
            "n_ctx": claim.n_ctx,
            "pool_cells": claim.shape.cells,
            "pool_slots": claim.shape.slots,
            "weights_bytes": claim.weights_bytes,
            "pool_bytes": claim.pool_bytes,
            "scratch_bytes": claim.scratch_bytes,
            "state_bytes": claim.state_bytes,
        }
    # Sums of absurd but legal claims may exceed what the wire's integers hold.
    return {k: min(v, INT64_MAX) if type(v) is int else v for k, v in numbers.items()}


def _lines(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines as plain maps; the smallest ones of very many are summed up in one."""
    shown = list(lines)
    if len(shown) > LINES_MAX:
        shown = nlargest(LINES_MAX, lines, key=lambda x: x.bytes)
        rest = sum(x.bytes for x in lines) - sum(x.bytes for x in shown)
        count = len(lines) - LINES_MAX
        shown.append(Line("others", rest, detail=f"{count} smaller lines"))
    return [
        {
            "key": x.key,
            "bytes": min(x.bytes, INT64_MAX),
            "unmeasured": x.unmeasured,
            "detail": x.detail,
        }
        for x in shown
    ]
