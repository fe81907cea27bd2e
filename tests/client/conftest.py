"""A scripted broker per test, on a private ipc path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_broker import ScriptedBroker


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[ScriptedBroker]:
    with ScriptedBroker(f"ipc://{short_tmp}/b.ipc") as broker:
        yield broker


@pytest.fixture
def patient_broker(short_tmp: Path) -> Iterator[ScriptedBroker]:
    """So long a heartbeat that it heals nothing within a test."""
    with ScriptedBroker(f"ipc://{short_tmp}/b.ipc", heartbeat_ms=600_000) as broker:
        yield broker
