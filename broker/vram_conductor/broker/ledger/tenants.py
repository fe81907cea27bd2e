"""What a principal is shown of the others (*pure*): how much they have, never their names."""

from __future__ import annotations

from collections.abc import Iterable

from vram_conductor.protocol.values import Line

_OWNED = ("state", "parked", "lease")
"""Ledger lines that are named after agents, conversations and leases:
``parked:principal/agent/name``."""


def own_names(names: Iterable[str], principal: str, more: int = 0) -> list[str]:
    """Names as ``principal/agent…`` without those of other principals, which are counted in one
    last entry: ``1 other``, ``2 others``. What has no owner (``pool:…``, ``weights:…``) stays.
    ``more``: how many are not among ``names``, and are counted too."""
    own: list[str] = []
    others = more
    for name in names:
        if _owner(name) in ("", principal):
            own.append(name)
        else:
            others += 1
    return [*own, *([_count(others)] if others else [])]


def own_lines(lines: Iterable[Line], principal: str | None) -> list[Line]:
    """Ledger lines with those of other principals summed up by kind (``state:others``);
    all as they are for nobody in particular (None: the operator)."""
    if principal is None:
        return list(lines)
    own: list[Line] = []
    others: dict[str, list[int]] = {}
    for line in lines:
        what, _, name = line.key.partition(":")
        if what in _OWNED and _owner(name) != principal:
            others.setdefault(what, []).append(line.bytes)
        else:
            own.append(line)
    for what, sizes in others.items():
        own.append(Line(f"{what}:others", sum(sizes), detail=_count(len(sizes))))
    return own


def _owner(name: str) -> str:
    """The principal in a name; names have no slash themselves. Empty: it has none."""
    return name.partition("/")[0] if "/" in name else ""


def _count(others: int) -> str:
    return "1 other" if others == 1 else f"{others} others"
