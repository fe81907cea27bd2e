"""Device memory that sleeps, on stand-ins for libcuda and libcudart."""

from __future__ import annotations

import pytest
from vmm_faults import MOVES
from vmm_rig import Rig, stub_rig
from vmm_scenes import SCENES


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return stub_rig(tmp_path_factory.mktemp("vmm"))


@pytest.mark.parametrize("name", list(SCENES))
def test_scene(rig: Rig, name: str) -> None:
    rig.run("vmm_scenes", name)


@pytest.mark.parametrize("move", list(MOVES))
def test_every_call_of_the_driver_may_fail(rig: Rig, move: str) -> None:
    rig.run("vmm_faults", move)
