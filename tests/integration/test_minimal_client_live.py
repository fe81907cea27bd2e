"""The client of sixty lines, without our library, on the real path."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from scene import BYSTANDER, SMOL, Scene, until

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "minimal_client.py"


def run(scene: Scene, model: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CLIENT), scene.stage.endpoint, model],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.real
def test_it_registers_an_agent_and_streams_an_answer(scene: Scene, smollm2: Path) -> None:
    with scene.undisturbed():
        done = run(scene, SMOL)
        assert (done.returncode, done.stderr) == (0, "")
        text, _, receipt = done.stdout.rstrip().rpartition("\n")
        usage = ast.literal_eval(receipt)
        assert len(text) > 40, "an answer of up to 48 tokens"
        assert 0 < usage["generated_tokens"] <= 48
        # Its agent was for this session only.
        until(lambda: [agent.agent for agent in scene.conductor.list()] == [BYSTANDER], "it left")


def test_an_error_is_its_message_and_exit_code_1(scene: Scene) -> None:
    with scene.undisturbed():
        done = run(scene, "another-model")
        assert done.returncode == 1
        assert done.stderr.startswith("no_such_model: ")
        assert done.stdout == ""
