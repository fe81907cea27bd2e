"""What ``--model`` names: a file that is here, or something for the worker to find."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_broker import ScriptedBroker

from vram_conductor.client import cli
from vram_conductor.client.model_argument import model_argument
from vram_conductor.protocol import messages as wire

LOCAL, FAR = "ipc:///run/b.ipc", "tcp://10.0.0.1:7000"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("my.gguf", "sub/my.gguf", "smollm2-135m"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize("typed", ["my.gguf", "./my.gguf", "sub/my.gguf", "sub/../my.gguf"])
def test_a_file_that_is_here_gets_its_absolute_path(here: Path, typed: str) -> None:
    found = Path(model_argument(typed, LOCAL, here))
    assert found.is_absolute()
    assert found.samefile(here / typed)
    assert model_argument(typed, FAR, here) == typed, "it is not there"


@pytest.mark.parametrize(
    "typed",
    ["smollm2-135m", "other.gguf", "models/other.gguf", "sub", "sub/", "./sub", "a/" * 3000],
)
def test_everything_else_is_the_workers_to_find(here: Path, typed: str) -> None:
    assert model_argument(typed, LOCAL, here) == typed


def test_the_home_folder_is_known_where_a_shell_has_not_said_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert model_argument("~/my.gguf", LOCAL) == str(here / "my.gguf")
    assert model_argument("~nobody-has-this-name/my.gguf", LOCAL).startswith("~")


@given(st.text())
def test_no_text_is_too_odd(typed: str) -> None:
    assert model_argument(typed, LOCAL, Path("/nowhere")) == typed


def test_register_sends_it(
    broker: ScriptedBroker, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here / "sub")
    for typed in ("../my.gguf", "smollm2-135m"):
        cli.main(["register", "a", "--model", typed, "--clients", broker.endpoint])
    first, second = broker.of(wire.Register)
    assert Path(first.model).samefile(here / "my.gguf")
    assert second.model == "smollm2-135m"
