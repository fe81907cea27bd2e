"""One system that many end-to-end tests share; each cleans up after itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scene import MIB, Scene, with_bystander

from vram_conductor.client.stage import StageDevice


@pytest.fixture(scope="session")
def shared_scene() -> Iterator[Scene]:
    """A cpu device of 320 MiB with one agent, ``bystander``."""
    with Scene(StageDevice(capacity_bytes=320 * MIB, host_cap_bytes=256 * MIB)) as scene:
        yield with_bystander(scene)


@pytest.fixture
def scene(shared_scene: Scene) -> Iterator[Scene]:
    """The shared system; what a test registered is gone after it, and the books are as before."""
    with shared_scene.tidied():
        yield shared_scene
