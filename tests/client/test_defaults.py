"""The configuration of somebody who has none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from vram_conductor.client import defaults
from vram_conductor.client.defaults import (
    config_home,
    default_text,
    find_config,
    gpu_indexes,
    make_default,
)
from vram_conductor.protocol.config import Config, load_config, parse_bytes
from vram_conductor.protocol.errors import FailedPrecondition, Unavailable

GIB = 1 << 30


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VRAM_CONDUCTOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)


def test_a_named_file_beats_the_environment_beats_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_config(None) is None
    own = config_home()
    assert own == tmp_path / "config/vram-conductor/conductor.toml"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert find_config(None) == own
    monkeypatch.setenv("VRAM_CONDUCTOR_CONFIG", "/from/environment.toml")
    assert find_config(None) == Path("/from/environment.toml")
    assert find_config("given.toml") == Path("given.toml")


def test_gpus_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null", "nvidia3x"):
        (tmp_path / name).touch()
    assert gpu_indexes(tmp_path) == [0, 2, 10]
    assert gpu_indexes(tmp_path / "nowhere") == []


def decoded(text: str) -> Config:
    return msgspec.toml.decode(text, type=Config)


def test_a_box_with_gpus_serves_on_all_of_them() -> None:
    config = decoded(default_text([0, 1], 64 * GIB))
    assert [device.id for device in config.device] == ["cuda:0", "cuda:1"]
    assert {device.kind for device in config.device} == {"cuda"}
    assert parse_bytes(config.device[0].capacity) == 0, "the card's own size"
    assert parse_bytes(config.device[0].host_cap) == 16 * GIB


def test_a_box_without_serves_on_a_quarter_of_its_memory() -> None:
    (device,) = decoded(default_text([], 64 * GIB)).device
    assert (device.id, device.kind) == ("cpu", "cpu")
    assert parse_bytes(device.capacity) == 16 * GIB
    (tiny,) = decoded(default_text([], 1 << 20)).device
    assert parse_bytes(tiny.capacity) == 256 << 20


def test_it_is_written_whole_and_for_us_alone(tmp_path: Path) -> None:
    path = make_default()
    assert path == tmp_path / "run/vram-conductor/default.toml"
    assert load_config(path).device
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_default() == path
    assert sorted(item.name for item in path.parent.iterdir()) == ["default.toml"]


def test_a_runtime_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run/vram-conductor"
    folder.mkdir(mode=0o755)
    with pytest.raises(FailedPrecondition) as caught:
        make_default()
    assert caught.value.reason == "unsafe_directory"
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(Unavailable) as caught:
        make_default()
    assert caught.value.reason == "runtime_dir_unusable"
    assert "default.toml" in caught.value.info.message


def test_the_runtime_folder_of_the_environment_is_used(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_BROKER_RUNTIME_DIR", str(short_tmp / "r"))
    assert make_default().parent == short_tmp / "r"


def test_this_box_gets_a_configuration_that_describes_it() -> None:
    config = load_config(make_default())
    gpus = gpu_indexes()
    assert len(config.device) == (len(gpus) or 1)
    assert defaults.CPU_SHARE == 4
