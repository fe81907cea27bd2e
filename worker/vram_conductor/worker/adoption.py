"""Parked states of a previous life: which of them are of use."""

from __future__ import annotations

import logging
from collections import Counter

from vram_conductor.worker.residency import Residency
from vram_conductor.worker.store import Store

OTHER_BUILD = "other_build"
"""Why a conversation is computed again after a change of the inference library."""

log = logging.getLogger(__name__)


def adopt(residency: Residency, store: Store, build: str) -> None:
    """Note whose states are here. Those of another library build go: their layout may differ
    though every size is the same, and others need the room."""
    strange: Counter[str] = Counter()
    for key in sorted(store.keys()):
        conversation, meta = residency.conversation(key), store.meta(key)
        if meta is None or meta.build == build:
            continue
        store.delete(key)
        conversation.lost = OTHER_BUILD
        strange[meta.build] += 1
    for other, count in sorted(strange.items()):
        log.warning(
            "%d parked states of build %s are of no use to this build %s: deleted",
            count,
            other,
            build,
        )
