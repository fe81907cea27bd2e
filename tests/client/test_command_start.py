"""Where the ``conductor`` command starts."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_INTERRUPTED = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = sys.argv[1], "--version"
runpy.run_module("vram_conductor", run_name="__main__", alter_sys=False)
"""


@pytest.mark.parametrize(
    "module", ["vram_conductor.client", "msgspec", "zmq", "vram_conductor.client.cli_bench"]
)
def test_an_interruption_while_modules_are_imported_is_one_like_any_other(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, module],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_the_command_is_what_the_module_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["conductor"].partition(":")
    assert module == "vram_conductor.__main__"
    assert callable(getattr(importlib.import_module(module), function))
    ran = subprocess.run(
        [sys.executable, "-m", "vram_conductor", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.startswith("conductor ")
