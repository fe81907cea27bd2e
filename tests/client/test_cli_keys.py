"""``conductor keys``: making, listing and revoking, as typed."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from vram_conductor.client.cli import main
from vram_conductor.protocol.key_files import KeyFolder, load_key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VRAM_CONDUCTOR_BROKER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return KeyFolder(tmp_path / "state" / "keys")


def test_a_key_is_made_listed_and_revoked(
    folder: KeyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "list"]) == 0
    assert "conductor keys new NAME" in capsys.readouterr().out
    made = ["keys", "new", "alice-laptop", "--principal", "alice", "--agents", "4", "--kv", "2GiB"]
    assert main(made) == 0
    assert "start it again" in capsys.readouterr().out
    file = load_key(tmp_path / "alice-laptop.key")
    assert stat.S_IMODE((tmp_path / "alice-laptop.key").stat().st_mode) == 0o600
    assert file.broker == folder.pair().public
    (key,) = folder.read().keys
    assert (key.public, key.principal, key.role) == (file.public, "alice", "owner")
    assert (key.quota.agents, key.quota.kv_bytes, key.quota.vram_bytes) == (4, 2 << 30, None)
    assert main(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert file.public in shown
    assert file.secret not in shown
    assert "agents 4, kv 2.00 GiB" in shown
    assert main(["keys", "revoke", "alice-laptop"]) == 0
    assert folder.read().valid() == {}
    assert main(["keys", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.split("second\n")[-1])
    assert listed["keys"][0]["revoked"].endswith("Z")


def test_what_cannot_be_is_refused_and_leaves_no_file(
    folder: KeyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "alice"]) == 0
    assert "start it again" in capsys.readouterr().out
    assert main(["keys", "new", "alice", "--out", "other.key"]) == 5
    assert "key_exists" in capsys.readouterr().err
    assert main(["keys", "new", "bob", "--out", "alice.key"]) == 5
    assert "key_file_exists" in capsys.readouterr().err
    assert main(["keys", "new", "a/b"]) == 8
    assert main(["keys", "new", "bob", "--agents", "-1"]) == 8
    assert main(["keys", "new", "bob", "--vram", "much"]) == 8
    assert main(["keys", "revoke", "carol"]) == 4
    assert "conductor keys list" in capsys.readouterr().err
    assert [key.name for key in folder.read().keys] == ["alice"]
    assert sorted(path.name for path in tmp_path.glob("*.key")) == ["alice.key"]


def test_the_folder_is_the_configurations(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VRAM_CONDUCTOR_BROKER_STATE_DIR")
    config = tmp_path / "c.toml"
    config.write_text(f'[broker]\nkeys_dir = "{tmp_path / "mine"}"\n')
    assert main(["keys", "new", "w", "--role", "worker", "--config", str(config)]) == 0
    assert [key.role for key in KeyFolder(tmp_path / "mine").read().keys] == ["worker"]
    assert not folder.exists
