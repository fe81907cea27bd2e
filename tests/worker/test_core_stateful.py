"""Random lives of a worker, see ``core_life``, on every kind of lanes."""

from __future__ import annotations

import sys

from core_driver import LanesKind
from core_life import Life, Sleep
from hypothesis import settings

from vram_conductor.protocol.values import KVType
from vram_conductor.worker.streams import Joining

TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

Sleep.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSleep = Sleep.TestCase


class Late(Life):
    """A life on lanes of their own: batches and moves come back when a dice says so, and whatever
    is told meanwhile finds things half done."""

    lanes: LanesKind = "late"
    joining = Joining(4)


Late.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLate = Late.TestCase


class LateSleep(Sleep):
    """The same where models and pools sleep."""

    lanes: LanesKind = "late"


LateSleep.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLateSleep = LateSleep.TestCase


class TwoPools(LateSleep):
    """The same where a model's agents have KV of two types, and so two pools on its weights."""

    second: KVType = "q8_0"


TwoPools.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTwoPools = TwoPools.TestCase


class Free(Sleep):
    """The same with threads, which take turns as often as can be."""

    lanes: LanesKind = "free"
    second: KVType = "q8_0"
    joining = Joining(4)

    def __init__(self) -> None:
        super().__init__()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            sys.setswitchinterval(self._switch_s)


Free.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestFree = Free.TestCase
