"""Device memory that sleeps, on stand-ins for libcuda and libcudart."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_shim import Fault
from vmm_faults import MOVES
from vmm_rig import Rig, stub_rig
from vmm_scenes import SCENES
from vmm_stub_scenes import SCENES as STUB_SCENES
from way_scenes import ENVIRONMENT
from way_scenes import SCENES as WAY_SCENES


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return stub_rig(tmp_path_factory.mktemp("vmm"))


@pytest.mark.parametrize("name", list(SCENES))
def test_scene(rig: Rig, name: str) -> None:
    rig.run("vmm_scenes", name)


def test_much_memory_comes_and_goes(rig: Rig) -> None:
    rig.run("vmm_long", "5", "20")


@pytest.mark.parametrize("name", list(STUB_SCENES))
def test_scene_of_the_stand_in(rig: Rig, name: str) -> None:
    rig.run("vmm_stub_scenes", name)


@pytest.mark.parametrize("name", list(WAY_SCENES))
def test_scene_of_the_way_to_the_device(rig: Rig, name: str) -> None:
    rig.run("way_scenes", name, **ENVIRONMENT.get(name, {}))


def test_the_fault_shim_of_the_gpu_tests(rig: Rig, tmp_path: Path) -> None:
    runtime, driver = rig.env["STUB_RUNTIME"], rig.env["VRAM_CONDUCTOR_LIBCUDA"]
    fault = Fault(tmp_path, driver, runtime)
    env = {**fault.env, "LD_PRELOAD": f"{rig.vmm}:{fault.env['LD_PRELOAD']}", "STUB_CUDA": driver}
    rig.run("vmm_shim", str(fault.path), **env)


@pytest.mark.parametrize("move", list(MOVES))
def test_every_call_of_the_driver_may_fail(rig: Rig, move: str) -> None:
    rig.run("vmm_faults", move)


@pytest.mark.parametrize("play", ["machine", "threads"])
def test_random_moves(rig: Rig, play: str) -> None:
    rig.run("vmm_random", play)
