"""What is really where, for RESIDENCY and READY. *Pure.*"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vram_conductor.protocol.commands import Parked, Place
from vram_conductor.protocol.values import Line, MoveRate
from vram_conductor.worker.residency import Conversation, Residency
from vram_conductor.worker.store import Store

PLACES_MAX = 4096
"""Conversations in one report; more would be a megabyte at every change."""

Where = Literal["slot", "parked", "absent"]


@dataclass(frozen=True)
class Report:
    """The core's part of RESIDENCY; the shell adds epochs, ``seq`` and the memory sample."""

    lines: list[Line]
    host_lines: list[Line]
    places: list[Place]
    swaps: int
    lingered: int
    own_bytes: int
    rates: dict[str, MoveRate] = field(compare=False)
    """History, not a place: two reports of the same picture are equal."""


def report(
    residency: Residency, store: Store, where: Callable[[Conversation], Where], swaps: int
) -> Report:
    """The picture now. Keys are the ledger's."""
    lines = [_base(residency), *_weights(residency), *_pools(residency)]
    shown = _recent(residency)
    places = [_place(conversation, store, where(conversation)) for conversation in shown]
    host_lines = [*_host_lines(places, store), *_pinned(residency)]
    return Report(
        lines,
        host_lines,
        places,
        swaps,
        residency.lingered,
        residency.resident_bytes() - residency.reserve_bytes,
        residency.rates.report(),
    )


def _base(residency: Residency) -> Line:
    """What the process takes itself; more may be promised for it."""
    late = residency.reserve_bytes
    detail = f"{late} bytes more are kept for kernels that are loaded late" if late else ""
    return Line("base", residency.base_bytes - late, detail=detail)


def _weights(residency: Residency) -> list[Line]:
    """Weights that are on the device."""
    return [
        Line(f"weights:{model}", weights.bytes, detail=weights.path)
        for model, weights in residency.weights.items()
        if weights.resident
    ]


def _pools(residency: Residency) -> list[Line]:
    """Pools that are on the device, and what live contexts take beyond them, asleep or not."""
    lines: list[Line] = []
    scratch: list[Line] = []
    for key, pool in residency.pools.items():
        if pool.shape is None:
            continue
        if pool.awake:
            detail = f"{pool.shape.cells} cells, {pool.shape.slots} slots"
            lines.append(Line(f"pool:{key}", pool.open_bytes, detail=detail, shape=pool.shape))
        if pool.weights.scratch_bytes:
            scratch.append(Line(f"scratch:{key}", pool.weights.scratch_bytes))
    return lines + scratch


def _pinned(residency: Residency) -> list[Line]:
    """Weights that have a copy in pinned host memory."""
    return [
        Line(f"pinned:{model}", weights.handle.backup_bytes, detail=weights.path)
        for model, weights in residency.weights.items()
        if weights.handle is not None and weights.handle.backup_bytes
    ]


def _recent(residency: Residency) -> list[Conversation]:
    """The conversations that are listed: all, or the most recently used ones."""
    everyone = residency.conversations.values()
    if len(everyone) <= PLACES_MAX:
        return list(everyone)
    return heapq.nlargest(PLACES_MAX, everyone, key=lambda conversation: conversation.used_ns)


def _host_lines(places: Sequence[Place], store: Store) -> list[Line]:
    """Parked states; those of conversations that are not listed in one line."""
    listed = {place.conversation: place.parked_bytes for place in places if place.parked_bytes}
    lines = [
        Line(f"parked:{key}", listed[key], detail="pinned" if store.pinned(key) else "")
        for key in sorted(listed)
    ]
    others = [store.bytes(key) for key in store.keys() if key not in listed]  # noqa: SIM118
    if others:
        lines.append(Line("parked:others", sum(others), detail=f"{len(others)} more"))
    return lines


def _place(conversation: Conversation, store: Store, where: Where) -> Place:
    meta = store.meta(conversation.key)
    tokens = meta.n_tokens if meta else 0
    if where == "slot" and conversation.slot is not None:
        tokens = len(conversation.slot.tape)
    return Place(
        conversation=conversation.key,
        where=where,
        n_tokens=tokens,
        parked_bytes=store.bytes(conversation.key),
    )


def adopted(store: Store) -> list[Parked]:
    """The states that READY lists."""
    metas = [(key, store.meta(key)) for key in sorted(store.keys())]
    return [
        Parked(conversation=key, model=meta.model, n_tokens=meta.n_tokens, bytes=meta.payload_bytes)
        for key, meta in metas
        if meta is not None
    ]
