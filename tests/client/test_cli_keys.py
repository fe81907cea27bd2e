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
    assert file.public[:8] in shown
    assert file.secret not in shown
    assert "agents 4, kv 2.00 GiB" in shown
    assert main(["keys", "revoke", "alice-laptop"]) == 0
    assert folder.read().valid() == {}
    assert "kv 2.00 GiB" in capsys.readouterr().out
    assert main(["keys", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
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


def test_a_workers_key_may_be_for_some_devices_only(
    folder: KeyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = ["--role", "worker"]
    assert main(["keys", "new", "g", *worker, "--device", "cuda:0", "--device", "cpu"]) == 0
    assert "a worker of cuda:0, cpu" in capsys.readouterr().out
    assert main(["keys", "new", "any", *worker]) == 0
    assert "a worker of any device" in capsys.readouterr().out
    assert [key.devices for key in folder.read().keys] == [("cuda:0", "cpu"), ()]
    for wrong in (["--device", "cpu"], [*worker, "--device", "a b"], [*worker, "--device", ""]):
        assert main(["keys", "new", "bad", *wrong]) == 8
    assert not (tmp_path / "bad.key").exists()
    assert main(["keys", "list"]) == 0
    assert "cuda:0, cpu" in capsys.readouterr().out


def test_a_list_fits_a_terminal_and_names_whom_the_log_means(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    limits = ["--agents", "8", "--queued-jobs", "32", "--vram", "6GiB", "--kv", "2GiB"]
    name = "a-laptop-with-a-name-as-long-as-names-may-be-in-this-list-of-all"
    assert main(["keys", "new", name, "--principal", "alice", *limits]) == 0
    for number in range(3):
        assert main(["keys", "new", f"dashboard-{number}", "--role", "observer"]) == 0
    assert main(["keys", "revoke", "dashboard-1"]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for key in folder.read().keys:
        assert key.public[:8] in shown
    assert f"revoked {folder.read().keys[2].revoked[:10]}" in shown


def test_revoking_says_which_limits_went_with_the_key(
    folder: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    def revoke(name: str) -> str:
        capsys.readouterr()
        assert main(["keys", "revoke", name]) == 0
        return capsys.readouterr().out

    alice = ["--principal", "alice"]
    for made in (
        ["one", *alice, "--agents", "8", "--vram", "6GiB"],
        ["two", *alice, "--agents", "9"],
        ["three", *alice],
        ["gpu", "--role", "worker"],
    ):
        assert main(["keys", "new", *made]) == 0
    assert "limits" not in revoke("gpu")
    said = revoke("one")
    assert "limits of alice went with it: agents 8, vram 6.00 GiB" in said
    assert "what is left for two, three: agents 9" in said
    assert f"--principal alice --agents 8 --vram {6 << 30}" in said
    assert "limits" not in revoke("one"), "it was revoked before"
    assert "what is left for three: none" in revoke("two")
    assert "limits" not in revoke("three")
    assert main(["keys", "new", "four", *alice, "--kv", "1GiB"]) == 0
    assert "name them again" in revoke("four")
    assert main(["keys", "new", "five", *alice, "--kv", "1GiB"]) == 0
    capsys.readouterr()
    assert main(["keys", "revoke", "five", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "revoked": "five",
        "principal": "alice",
        "keys": [],
        "limits": {},
        "limits_before": {"kv_bytes": 1 << 30},
    }


def test_a_device_that_the_broker_has_not_is_said(
    folder: KeyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[[device]]\nid = "cpu"\nkind = "cpu"\ncapacity = "1GiB"\n')
    worker = ["--role", "worker", "--config", str(config)]
    assert main(["keys", "new", "one", *worker, "--device", "cpu", "--device", "nope"]) == 0
    err = capsys.readouterr().err
    assert "the configuration has no [[device]] nope, only cpu" in err
    assert "[[device]] cpu" not in err
    assert main(["keys", "new", "two", *worker]) == 0
    config.write_text("")
    assert main(["keys", "new", "three", *worker, "--device", "nope"]) == 0
    assert "[[device]]" not in capsys.readouterr().err
