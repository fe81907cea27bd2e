"""Several tenants of one broker, over loopback tcp with keys: what one of them cannot do to another,
whatever it sends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_process import end, until
from keyed_broker import KeyedBroker, until_in


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[KeyedBroker]:
    process = KeyedBroker(short_tmp)
    with process:
        yield process


# --- an ephemeral agent that somebody else ends -------------------------------------------------


def hold(broker: KeyedBroker, key: Path) -> subprocess.Popen[str]:
    """``conductor register --ephemeral``, as far as its agent is there."""
    conductor = [sys.executable, "-m", "vram_conductor.client.cli"]
    command = ["register", "temp", "--model", "echo", "--n-ctx", "256", "--ephemeral"]
    where = ["--clients", broker.endpoints["clients"], "--key", str(key)]
    process = subprocess.Popen(
        [*conductor, *command, *where], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    broker.stack.callback(end, process)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("temp stays until this command ends")
    return process


@pytest.mark.parametrize("how", ["revoked", "removed"])
def test_whoever_holds_an_ephemeral_agent_is_told_that_it_is_over(
    broker: KeyedBroker, how: str
) -> None:
    broker.keyed_echo()
    root = until_in(broker, broker.keys.new("root", "admin"))
    path = broker.keys.new("alice")
    until_in(broker, path).close()
    process = hold(broker, path)
    if how == "revoked":
        broker.keys.revoke("alice")
    else:
        root.unregister("temp", principal="alice")
    _, said = process.communicate(timeout=30)
    if how == "revoked":
        assert process.returncode == 9
        assert "key_revoked" in said or "key_refused" in said
    else:
        assert process.returncode == 4
        assert "temp is gone" in said
        assert "no_such_agent" in said
    until(lambda: not root.status().agents, "nothing is left of it")
