"""Random lives on threads over arenas that are pinned in the background: every answer is right, and
no state is ever copied from or to memory that is pinned in part."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from core_driver import Driver, LanesKind
from core_life import AGENTS, SMALLEST, Sleep
from fake_pinner import FakePinner
from fake_store import MemoryStore
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from vram_conductor.protocol.errors import DataLoss
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker import half_memory, pinning
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.pinning import Pinning
from vram_conductor.worker.store import ParkedMeta
from vram_conductor.worker.streams import Joining

STEP = fmt.GROW_BYTES


class PinnedStore(KVStore):
    """A store on files whose views are looked at; ``corrupt`` as in ``MemoryStore``."""

    def __init__(self, folder: Path, cap_bytes: int, pinner: FakePinner) -> None:
        self.corrupt: set[ConversationKey] = set()
        self.pinner = pinner
        self.seen: set[bool] = set()
        pinning = Pinning(1 << 40, pinner)
        super().__init__(ArenaDir(folder, "cuda:0"), cap_bytes, 3, pinning)

    def _look(self, view: memoryview) -> memoryview:
        covers = self.pinner.covers(view)
        assert covers is not None, "a copy by the device would fail"
        self.seen.add(covers)
        return view

    def writer(self, key: ConversationKey, need_bytes: int, max_bytes: int) -> memoryview:
        return self._look(super().writer(key, need_bytes, max_bytes))

    def read(self, key: ConversationKey) -> tuple[ParkedMeta, memoryview] | None:
        if key in self.corrupt:
            self.corrupt.discard(key)
            self.delete(key)
            raise DataLoss("state_corrupt", "checksum")
        found = super().read(key)
        return None if found is None else (found[0], self._look(found[1]))


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Any:
    """Every state is several pieces, and there is a reserve to grow into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_memory, "PIECE_BYTES", STEP // 4)
        patch.setattr(half_memory, "PIN_BYTES_MIN", 0)
        patch.setattr(pinning, "RESERVE_BYTES", 2 * STEP)
        yield


class PinnedLife(Sleep):
    """See ``test_core_stateful.Sleep``; the store has room for everything, or for little."""

    lanes: LanesKind = "free"
    joining = Joining(4)

    @initialize(
        budget=st.integers(SMALLEST, 1200),
        cap=st.sampled_from([6, 40, 1 << 14]),
        slice_ms=st.sampled_from([1, 30, 2000]),
        spans=st.booleans(),
        limit=st.sampled_from([4, 1 << 20]),
        seed=st.integers(0, 1 << 16),
    )
    def begin(
        self, budget: int, cap: int, slice_ms: int, spans: bool, limit: int, seed: int
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.pinner = FakePinner(spans=spans, limit_bytes=limit * STEP)
        self.store = PinnedStore(self.folder / "arenas", cap * STEP, self.pinner)
        self.driver = Driver(
            self.models,
            budget_bytes=budget,
            store=cast("MemoryStore", self.store),
            slice_ms=slice_ms,
            sleepable=self.sleepable,
            lanes=self.lanes,
            joining=self.joining,
            seed=seed,
        )
        for agent in sorted(AGENTS)[: 2 + budget % 5]:
            self._load(agent)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            super().teardown()
            for seen in self.store.seen:
                event("a copy from pinned memory" if seen else "a copy from pageable memory")
            self.pinner.check()
        finally:
            self.store.close()
            shutil.rmtree(self.folder)
        assert not self.pinner.ranges
        assert not self.pinner.faults


PinnedLife.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestPinnedLife = PinnedLife.TestCase
