"""Copies that go together, on stand-ins for libcuda and libcudart."""

from __future__ import annotations

import pytest
from gather_scenes import SCENES
from vmm_rig import Rig, stub_rig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return stub_rig(tmp_path_factory.mktemp("gather"))


@pytest.mark.parametrize("name", list(SCENES))
def test_scene(rig: Rig, name: str) -> None:
    rig.run("gather_scenes", name)
