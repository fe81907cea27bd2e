"""``conductor models``: list, pull, verify, with a catalogue of tiny wheels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from scripted_broker import ScriptedBroker
from tiny_wheels import CONTENT, entry, publish, use_only

from vram_conductor.client import cli
from vram_conductor.protocol.status import AgentStatus


def section(name: str, *lines: str, package: str = "tiny-model-0") -> str:
    model = entry()
    part = f'{{ package = "{package}", version = "1.0", member = "tiny/part0" }}'
    return "\n".join(
        [
            f'[[model]]\nname = "{name}"\nfile = "{name}.gguf"\nsha256 = "{model.sha256}"',
            f'size = {model.size}\nsource = {{ kind = "pypi-wheel", parts = [{part}] }}',
            *lines,
            "",
        ]
    )


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of a catalogue with three entries."""
    publish(tmp_path / "index")
    use_only(tmp_path / "index", monkeypatch)
    catalogue = tmp_path / "models.toml"
    gated = ['gated = true\nlicence = "Some Terms"\nlicence_url = "https://x"\nnotice = "Mind."']
    catalogue.write_text(
        section("tiny", 'licence = "MIT"\nn_ctx = 2048')
        + section("gated", *gated)
        + section("gone", package="no-such-package")
    )
    for name in [name for name in os.environ if name.startswith("VRAM_CONDUCTOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_CATALOGUE", str(catalogue))
    monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def listed(capsys: Any) -> dict[str, str]:
    assert cli.main(["models", "list", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    return {item["name"]: item["state"] for item in value["models"]}


def test_list_before_and_after(models: Path, capsys: Any) -> None:
    assert listed(capsys) == {"tiny": "no", "gated": "no", "gone": "no"}
    assert cli.main(["models", "pull", "tiny"]) == 0
    capsys.readouterr()
    assert listed(capsys)["tiny"] == "yes, verified"
    (models / "tiny.gguf.stamp.json").unlink()
    assert listed(capsys)["tiny"] == "yes, not verified"
    assert cli.main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "size", "n_ctx", "up", "to", "licence", "here"]
    assert lines[1].split() == ["tiny", "16", "B", "2048", "MIT", "yes,", "not", "verified"]
    assert lines[3].split() == ["gone", "16", "B", "-", "-", "no"]


def test_pull(models: Path, capsys: Any) -> None:
    assert cli.main(["models", "pull", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"tiny: fetched and verified, 16 B\n  {models}/tiny.gguf\n"
    assert err == "fetching tiny-model-0 1.0 (1 of 1)\n"
    assert cli.main(["models", "pull", "tiny", "--json"]) == 0
    (value,) = json.loads(capsys.readouterr().out)["models"]
    assert value["fetched"] is False
    assert value["path"] == f"{models}/tiny.gguf"


def test_all_names_are_checked_before_the_first_byte(models: Path, capsys: Any) -> None:
    assert cli.main(["models", "pull", "tiny", "tinny"]) == 4
    err = capsys.readouterr().err
    assert "'tinny' is not in the catalogue; did you mean tiny?" in err
    assert not models.exists()


def test_a_licence_has_to_be_accepted(models: Path, capsys: Any) -> None:
    assert cli.main(["models", "pull", "gated"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Mind.\n")
    assert "Some Terms (https://x)" in err
    assert "--accept-licence gated" in err
    assert cli.main(["models", "pull", "gated", "--accept-licence"]) == 0


def test_a_package_that_nobody_has(models: Path, capsys: Any) -> None:
    assert cli.main(["models", "pull", "gone"]) == 6
    assert "(download_failed)" in capsys.readouterr().err
    assert list(models.iterdir()) == []


def test_verify(models: Path, capsys: Any) -> None:
    assert cli.main(["models", "verify"]) == 0
    assert "no model is here" in capsys.readouterr().out
    assert cli.main(["models", "verify", "tiny"]) == 1
    assert "(model_not_pulled)" in capsys.readouterr().err
    cli.main(["models", "pull", "tiny"])
    capsys.readouterr()
    assert cli.main(["models", "verify"]) == 0
    assert capsys.readouterr().out == f"tiny: ok, sha256 {entry().sha256}\n"
    (models / "tiny.gguf").write_bytes(b"x" * len(CONTENT))
    assert cli.main(["models", "verify", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["models"] == [{"name": "tiny", "ok": False, "reason": "model_corrupt"}]
    assert "tiny.gguf is not tiny" in err


def test_a_broken_catalogue(models: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "models.toml").write_text("[[model]]\nname = 5\n")
    assert cli.main(["models", "list"]) == 8
    assert "models.toml" in capsys.readouterr().err
    assert not models.exists()


# --- models of one's own ----------------------------------------------------------------------


@pytest.fixture
def own(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own catalogue; no other is set."""
    monkeypatch.delenv("VRAM_CONDUCTOR_WORKER_CATALOGUE")
    return tmp_path / "vram-conductor" / "models.toml"


def gguf(path: Path, content: bytes = b"GGUF and more") -> Path:
    path.write_bytes(content)
    return path


def test_add_a_file_that_is_here(own: Path, tmp_path: Path, capsys: Any) -> None:
    path = gguf(tmp_path / "mine.gguf")
    assert cli.main(["models", "add", "mine", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        f"mine: {path}",
        f"  added to {own}",
        "use it: conductor register AGENT --model mine",
    ]
    assert listed(capsys)["mine"] == "yes, not verified"
    assert cli.main(["models", "list", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["models"][0]
    assert first["source"] == {"kind": "path", "path": str(path)}
    path.write_bytes(b"GGUF, another one")
    assert cli.main(["models", "verify", "mine"]) == 0, "it is the user's file"
    assert capsys.readouterr().out.startswith("mine: no digest to compare with, sha256 ")
    path.rename(tmp_path / "elsewhere")
    for verb in ("verify", "pull"):
        capsys.readouterr()
        assert cli.main(["models", verb, "mine"]) != 0
        assert f"bring it to {tmp_path}" in capsys.readouterr().err, "no pull brings it"
    (tmp_path / "elsewhere").rename(path)
    assert cli.main(["models", "remove", "mine"]) == 0
    assert "no file deleted, no longer in" in capsys.readouterr().out
    assert path.exists()
    assert "mine" not in listed(capsys)


def test_add_into_the_catalogue_that_is_set(models: Path, tmp_path: Path, capsys: Any) -> None:
    path = gguf(tmp_path / "mine.gguf")
    assert cli.main(["models", "add", "mine", str(path)]) == 0
    assert str(tmp_path / "models.toml") in capsys.readouterr().out
    assert list(listed(capsys)) == ["tiny", "gated", "gone", "mine"]


def test_a_name_is_taken_once(own: Path, tmp_path: Path, capsys: Any) -> None:
    one, two = gguf(tmp_path / "one.gguf"), gguf(tmp_path / "two.gguf")
    assert cli.main(["models", "add", "mine", str(one)]) == 0
    assert cli.main(["models", "add", "mine", str(two)]) == 5
    assert "(model_exists)" in capsys.readouterr().err
    assert cli.main(["models", "add", "--replace", "mine", str(two)]) == 0
    assert cli.main(["models", "list", "--json"]) == 0
    out = capsys.readouterr().out.partition("{")[2]
    (mine,) = [m for m in json.loads("{" + out)["models"] if m["name"] == "mine"]
    assert mine["path"] == str(two)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nothing.gguf", "no_such_file"),
        ("text.gguf", "bad_model"),
        ("big-00002-of-00002.gguf", "model_part_missing"),
        ("hf:one-word", "bad_model_source"),
        ("~nobody-has-this-name.gguf", "no_such_file"),
        ("\udcff.gguf", "bad_catalogue"),
    ],
)
def test_what_cannot_be_added(
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    source: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    gguf(tmp_path / "text.gguf", b"#!/bin/sh")
    gguf(tmp_path / "big-00002-of-00002.gguf")
    gguf(tmp_path / "\udcff.gguf")
    assert cli.main(["models", "add", "mine", source]) != 0
    assert f"({reason})" in capsys.readouterr().err
    assert not own.exists()


def test_any_part_names_a_split_model(own: Path, tmp_path: Path, capsys: Any) -> None:
    for number in (1, 2):
        gguf(tmp_path / f"big-0000{number}-of-00002.gguf")
    assert cli.main(["models", "add", "big", str(tmp_path / "big-00002-of-00002.gguf")]) == 0
    assert "big-00001-of-00002.gguf" in capsys.readouterr().out
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    assert listed(capsys)["big"] == "no"


def test_a_bad_name_is_said_before_anything_is_fetched(own: Path, capsys: Any) -> None:
    assert cli.main(["models", "add", "my model", "pypi:no-such==1/m.gguf"]) != 0
    err = capsys.readouterr().err
    assert "letters, digits" in err
    assert "fetching" not in err


def test_add_what_wheels_carry(own: Path, models: Path, tmp_path: Path, capsys: Any) -> None:
    parts = [b"GGUF, the first part, ", b"the second"]
    publish(tmp_path / "index", parts)
    sources = [f"pypi:tiny-model-{index}==1.0/tiny/part{index}" for index in range(2)]
    assert cli.main(["models", "add", "wheeled", *sources]) == 0
    assert (models / "wheeled.gguf").read_bytes() == b"".join(parts)
    capsys.readouterr()
    assert listed(capsys)["wheeled"] == "yes, verified"
    assert cli.main(["models", "remove", "wheeled"]) == 0
    assert "32 B deleted" in capsys.readouterr().out
    assert list(models.iterdir()) == []
    assert "wheeled" not in listed(capsys)


def test_remove_takes_the_files_and_leaves_the_packaged_name(models: Path, capsys: Any) -> None:
    assert cli.main(["models", "pull", "tiny"]) == 0
    assert cli.main(["models", "remove", "tiny", "nobody"]) == 4
    assert (models / "tiny.gguf").exists(), "all names are checked before the first file"
    assert cli.main(["models", "remove", "tiny"]) == 0
    assert list(models.iterdir()) == []


def agent(name: str, model: str) -> AgentStatus:
    return AgentStatus(
        principal="local",
        agent=name,
        model=model,
        model_id="m",
        device="cpu",
        state="ready",
        n_ctx=512,
    )


def test_remove_says_which_agents_use_the_model(
    own: Path,
    models: Path,
    tmp_path: Path,
    broker: ScriptedBroker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", broker.endpoint)
    path = gguf(tmp_path / "mine.gguf")
    assert cli.main(["models", "add", "mine", str(path)]) == 0
    for name, model in (("coder", "mine"), ("other", "tiny"), ("writer", str(path))):
        broker.agents[name] = agent(name, model)
    capsys.readouterr()
    assert cli.main(["models", "remove", "mine", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["models"][0]["used_by"] == ["coder", "writer"]
    assert err == (
        "warning: mine is used by coder, writer: they go on until their worker starts anew, and "
        "then need it back (conductor models add mine)\n"
    )
    broker.mute = True
    assert cli.main(["models", "add", "mine", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["models", "remove", "mine"]) == 0, "a broker that does not answer is no matter"
    assert capsys.readouterr().err == ""


def test_wheels_overwrite_no_file_that_is_here(
    own: Path, models: Path, tmp_path: Path, capsys: Any
) -> None:
    publish(tmp_path / "index", [b"GGUF of a wheel"])
    models.mkdir()
    mine = gguf(models / "wheeled.gguf")
    assert cli.main(["models", "add", "wheeled", "pypi:tiny-model-0==1.0/tiny/part0"]) != 0
    assert f"{mine} is there already" in capsys.readouterr().err
    assert mine.read_bytes() == b"GGUF and more"


def test_a_bad_entry_of_ones_own_is_taken_out(models: Path, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "models.toml"
    before = own.read_text()
    own.write_text(before + section("odd").replace("odd.gguf", "a\\u0000b"))
    assert cli.main(["models", "list"]) == 8
    err = " ".join(capsys.readouterr().err.split())
    assert f"{own}: model 'odd'" in err
    assert "in that file, or take it out of your own: conductor models remove NAME" in err
    assert cli.main(["models", "remove", "tiny"]) == 8
    assert "model 'odd'" in capsys.readouterr().err
    assert cli.main(["models", "remove", "odd"]) == 0
    assert f"odd: no file deleted, no longer in {own}" in capsys.readouterr().out
    assert own.read_text().rstrip() == before.rstrip()
    assert set(listed(capsys)) == {"tiny", "gated", "gone"}
