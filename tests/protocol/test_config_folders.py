"""Where an instance keeps its things: two of them never meet by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vram_conductor.protocol.config import BrokerConfig, Config, WorkerConfig, arena_dir

SHARED = Path(f"/dev/shm/vram-conductor-{os.getuid()}")


def of(runtime_dir: str, own: str = "") -> Path:
    return arena_dir(
        Config(broker=BrokerConfig(runtime_dir=runtime_dir), worker=WorkerConfig(arena_dir=own))
    )


def test_parked_states_without_any_configuration() -> None:
    assert arena_dir(Config()) == SHARED


def test_an_instance_with_a_runtime_folder_of_its_own_has_arenas_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = of("/run/a"), of("/run/b")
    assert len({first, second, SHARED}) == 3
    assert {first.parent, second.parent} == {SHARED.parent}
    assert all(path.name.startswith(SHARED.name + "-") for path in (first, second))
    assert of("/run/a") == of("/run/../run/a/") == first, "the same after a restart"
    monkeypatch.chdir(tmp_path)
    assert of("a") == of(f"{tmp_path}/a"), "a relative folder is what it stands for"


def test_a_named_folder_is_taken_as_it_is() -> None:
    assert of("/run/a", "/dev/shm/mine") == Path("/dev/shm/mine")
