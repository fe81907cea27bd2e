"""The programs in ``examples/`` run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_broker import Peer, ScriptedBroker, begun

from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.values import Usage

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str, endpoint: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "VRAM_CONDUCTOR_CLIENTS": endpoint},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_three_agents(broker: ScriptedBroker) -> None:
    out = run("three_agents.py", endpoint=broker.endpoint)
    assert out.count("one, two, three.") == 6
    assert [message.agent for message in broker.of(wire.Register)] == [
        "py-coder",
        "py-reviewer",
        "py-writer",
    ]
    assert len(broker.of(wire.Bye)) == 1


def test_three_agents_take_the_context_that_fits(broker: ScriptedBroker) -> None:
    admit = broker.on[wire.Register]

    def tight(peer: Peer, message: wire.Register) -> None:
        if message.n_ctx == 512:
            admit(peer, message)
            return
        details = {"largest_n_ctx_that_fits": 512}
        text = "VRAM_LEDGER_DENY code=CAP largest_n_ctx=512"
        peer.fail(
            message.rid,
            ErrorInfo(Code.RESOURCE_EXHAUSTED, "VRAM_LEDGER_DENY", text, details=details),
        )

    broker.on[wire.Register] = tight
    out = run("three_agents.py", endpoint=broker.endpoint)
    assert out.count("VRAM_LEDGER_DENY code=CAP") == 3
    assert out.count("one, two, three.") == 6


@pytest.mark.parametrize("slow", [False, True])
def test_async_agents(broker: ScriptedBroker, slow: bool) -> None:
    def stop(peer: Peer, message: wire.Cancel) -> None:
        peer.done(message.rid, 3, Usage(generated_tokens=3, stop_reason="cancelled"))

    broker.on[wire.Cancel] = stop
    if slow:
        broker.on[wire.Decode] = begun
    out = run("async_agents.py", "any-model", "0.3", endpoint=broker.endpoint)
    for name in ("ada", "bob", "eve"):
        assert f"{name}: 'one'" in out
        assert (f"{name}: cancelled after 3 tokens" in out) == slow
