"""The real engine, once per session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine


@pytest.fixture(scope="session")
def engine() -> Iterator[LlamaEngine]:
    """llama.cpp on cpu. One thread: two would wait for each other on a busy machine."""
    engine = open_engine(EngineOptions(threads=1))
    yield engine
    engine.close()
