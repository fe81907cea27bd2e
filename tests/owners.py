"""Holds a core to its rule of who may touch what, while tests run it on any kind of lanes.

The rule (ARCHITECTURE, "Threads"): what jobs, conversations and replies there are is the engine
thread's; which agents, weights and pools there are it changes only while nothing is hauled, so
that a haul may look; weights and what wakes them belong to the haul that is under way; a pool in
which something is under way is left alone by everybody else. Somebody who breaks it breaks it here
at once, and not only when two threads happen to meet.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from vram_conductor.worker.core import Core
from vram_conductor.worker.lane import Errand, Report
from vram_conductor.worker.residency import Conversation, PoolState
from vram_conductor.worker.traffic import Haul

_CHANGES = ("__setitem__", "__delitem__", "pop", "popitem", "clear", "update", "setdefault")
_LOOKS = ("__iter__", "keys", "values", "items")
_LOADER = (
    "load",
    "free",
    "back_up",
    "drop_backup",
    "sleep",
    "restore",
    "start_wake",
    "join",
    "plan_backups",
    "reconsider",
)


class OwnedDict(dict[Any, Any]):
    """A dict that asks before it is changed, and before somebody goes through it. Looking one key
    up is safe at any time."""

    def __init__(
        self, content: Iterable[Any], change: Callable[[], None], look: Callable[[], None]
    ) -> None:
        super().__init__(content)
        self.change, self.look = change, look


def _asking(name: str, ask: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    @functools.wraps(plain)
    def method(self: OwnedDict, *args: Any, **kwargs: Any) -> Any:
        getattr(self, ask)()
        return plain(self, *args, **kwargs)

    return method


for _name in _CHANGES:
    setattr(OwnedDict, _name, _asking(_name, "change"))
for _name in _LOOKS:
    setattr(OwnedDict, _name, _asking(_name, "look"))


class Owners:
    """Watches one core. Make it on the engine thread, before the first command.

    Args:
        violations: where every breach is noted, besides the AssertionError that it is: somebody
            may take that for a failed move.
    """

    def __init__(self, core: Core, violations: list[str]) -> None:
        self._traffic = core._traffic
        self._violations = violations
        self._engine = threading.get_ident()
        self._here = threading.local()
        residency, jobs = core.residency, core.jobs
        for name in ("agents", "weights", "pools"):
            change = functools.partial(self._check_still, name)
            look = functools.partial(self._check_mover, name)
            setattr(residency, name, OwnedDict(getattr(residency, name).items(), change, look))
        for owner, name in ((residency, "conversations"), (jobs, "_by_op")):
            check = functools.partial(self._check_engine, name)
            setattr(owner, name, OwnedDict(getattr(owner, name).items(), check, check))
        self._guard(core.outbox, ("reply", "take"), self._check_engine)
        self._guard(core._mover._loader, _LOADER, self._check_alone)
        self._guard(core._mover._opener, ("open", "close", "sleep", "wake"), self._check_pool)
        names = ("park", "release", "clear", "resume", "roll_back")
        self._guard(core._mover._parking, names, self._check_pool)
        self._mark_hauls()

    def _mark_hauls(self) -> None:
        """Know which thread does what belongs to a haul."""
        plain = self._traffic.begin

        def begin(errand: Errand) -> None:
            if isinstance(errand, Haul):
                errand.do = functools.partial(self._do, errand, errand.do)  # type: ignore[method-assign]
            plain(errand)

        self._traffic.begin = begin  # type: ignore[method-assign]

    def _do(self, haul: Haul, plain: Callable[[Report], None], report: Report) -> None:
        self._here.haul = haul
        try:
            plain(report)
        finally:
            self._here.haul = None

    def _guard(self, owner: Any, names: Iterable[str], check: Callable[..., None]) -> None:
        for name in names:
            setattr(owner, name, self._guarded(getattr(owner, name), check))

    def _guarded(self, plain: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            check(plain.__qualname__, *args)
            return plain(*args, **kwargs)

        return method

    # --- the rule -----------------------------------------------------------------------------

    @property
    def _hauls(self) -> bool:
        """Whether this is within the haul that is under way."""
        haul = getattr(self._here, "haul", None)
        return haul is not None and haul is self._traffic.haul

    @property
    def _decides(self) -> bool:
        """Whether this is the engine thread, and not within a haul."""
        return threading.get_ident() == self._engine and not self._hauls

    def _check_engine(self, what: str, *_: Any) -> None:
        self._demand(self._decides, f"{what}: the engine thread's")

    def _check_still(self, what: str, *_: Any) -> None:
        still = self._decides and self._traffic.haul is None
        self._demand(still, f"{what}: changed by the engine thread while nothing is hauled")

    def _check_mover(self, what: str, *_: Any) -> None:
        self._demand(self._decides or self._hauls, f"{what}: no business of a lane's")

    def _check_alone(self, what: str, *_: Any) -> None:
        free = self._decides and self._traffic.haul is None
        self._demand(self._hauls or free, f"{what}: the haul's that is under way")

    def _check_pool(self, what: str, of: PoolState | Conversation, *more: Any) -> None:
        if isinstance(of, Conversation):
            pool = next((item for item in more if isinstance(item, PoolState)), of.pool)
        else:
            pool = of
        key = pool.key if pool is not None else ""
        haul = self._traffic.haul
        mine = self._hauls and haul is not None and key in haul.pools
        free = self._decides and not self._traffic.occupied(key)
        self._demand(mine or free or not key, f"{what}: something is under way in {key}")

    def _demand(self, fine: bool, what: str) -> None:
        if not fine:
            breach = f"{what} (on {threading.current_thread().name})"
            self._violations.append(breach)
            raise AssertionError(breach)
