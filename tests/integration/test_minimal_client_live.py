"""The client of sixty lines, without our library, on the real path."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from scene import SMOL, Scene

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "minimal_client.py"


@pytest.mark.real
def test_it_registers_an_agent_and_streams_an_answer(scene: Scene, smollm2: Path) -> None:
    with scene.undisturbed():
        done = subprocess.run(
            [sys.executable, str(CLIENT), scene.stage.endpoint, SMOL],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        text, _, receipt = done.stdout.rstrip().rpartition("\n")
        usage = ast.literal_eval(receipt)
        assert len(text) > 40, "an answer of up to 48 tokens"
        assert 0 < usage["generated_tokens"] <= 48
        agent = scene.agent("minimal")
        assert (agent.model, agent.n_ctx, agent.state) == (SMOL, 1024, "ready")
        tokens = usage["prompt_tokens"] + usage["generated_tokens"]
        assert [talk.tokens for talk in agent.conversations] == [tokens]
        # It is another program's agent as much as its own: both belong to this user.
        assert scene.run("minimal", " And", max_tokens=2).usage.prompt_tokens > tokens
        scene.conductor.unregister("minimal")
