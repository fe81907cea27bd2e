"""Several tenants of one broker, over loopback tcp with keys: what one of them cannot do to
another, whatever it sends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broker_process import RawClient, end, until
from keyed_broker import KeyedBroker, until_in

from vram_conductor.client import Conductor
from vram_conductor.protocol import sockets
from vram_conductor.protocol.errors import Code, ConductorError, ErrorInfo
from vram_conductor.protocol.key_files import load_key
from vram_conductor.protocol.messages import (
    Accepted,
    Cancel,
    Credit,
    Decode,
    Done,
    Error,
    Resume,
    Tokens,
)
from vram_conductor.protocol.values import Usage


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


# --- what is another's --------------------------------------------------------------------------


def enter(broker: KeyedBroker, name: str) -> RawClient:
    """A session of ``name``, without our client library."""
    path = broker.keys.new(name)
    until_in(broker, path).close()
    socket = sockets.connect(broker.context, broker.endpoints["clients"], key=load_key(path))
    client = RawClient(socket)
    broker.stack.callback(socket.close, 0)
    assert client.hello().principal == name
    return client


def refusal(client: RawClient, message: Resume | Cancel) -> ErrorInfo:
    client.send(message)
    return client.expect(Error, message.rid).error


def test_a_rid_of_another_principal_is_nobodys(broker: KeyedBroker) -> None:
    """Alice is in the midst of an answer, which stands at her credit."""
    broker.keyed_echo(rate=50.0)
    alice, bob = enter(broker, "alice"), enter(broker, "bob")
    eye = until_in(broker, broker.keys.new("eye", "observer", principal="alice"))
    alice.register("coder")
    rid = alice.decode("coder", 4_000, window=5)
    pieces = [alice.expect(Tokens, rid) for _ in range(5)]
    for theft in (Resume(rid=rid), Resume(rid=rid, from_seq=3), Cancel(rid=rid)):
        error = refusal(bob, theft)
        assert (error.code, error.reason) == (Code.NOT_FOUND, "unknown_rid")
    bob.send(Credit(rid=rid, ack=0, upto=1_000))
    bob.ping()
    alice.ping()
    # The same rid is another request of bob's own, with a job and a number of its own.
    bob.register("coder")
    bob.send(Decode(rid=rid, agent="coder", tokens=[9], max_tokens=3))
    assert bob.expect(Accepted, rid).job == 1
    his, usage = bob.result(rid)
    assert isinstance(usage, Usage)
    assert (usage.generated_tokens, len(his)) == (3, 3)
    bob.send(Cancel(rid=rid))
    bob.ping()
    assert [(job.job, job.state) for job in eye.status().jobs] == [(1, "running")]
    assert not alice.socket.poll(0), "nothing came beyond her credit"
    alice.send(Credit(rid=rid, ack=5, upto=20))
    pieces += [alice.expect(Tokens, rid) for _ in range(15)]
    assert [piece.seq for piece in pieces] == list(range(20))
    alice.send(Cancel(rid=rid))
    alice.send(Credit(rid=rid, ack=20, upto=10_000))
    assert alice.expect(Done, rid).usage.stop_reason == "cancelled"


def told(what: Callable[[], object]) -> str:
    """The reason for which it is refused."""
    with pytest.raises(ConductorError) as caught:
        what()
    return caught.value.reason


def speak(client: Conductor, conversation: str, token: int) -> int:
    """One turn; how many tokens the conversation has then."""
    reply = client.decode(
        "coder", tokens=[token] * 3, max_tokens=4, conversation=conversation, continue_=True
    )
    assert reply.result().usage.generated_tokens == 4
    return client.history("coder", conversation).tokens


def test_a_conversation_name_opens_nobody_elses(broker: KeyedBroker) -> None:
    broker.keyed_echo()
    alice, bob = (until_in(broker, broker.keys.new(name)) for name in ("alice", "bob"))
    alice.register("coder", "echo", n_ctx=1024)
    assert speak(alice, "plan", 7) == 7
    before = alice.history("coder", "plan")

    def thefts(reason: str) -> None:
        assert told(lambda: bob.history("coder", "plan")) == reason
        assert told(lambda: bob.fork("coder", "copy", conversation="plan")) == reason

    thefts("no_such_agent")
    assert told(lambda: speak(bob, "plan", 8)) == "no_such_agent"
    assert told(lambda: bob.reset("coder", "plan")) == "no_such_agent"
    # With an agent of that name, everything is bob's own.
    bob.register("coder", "echo", n_ctx=1024)
    thefts("no_such_conversation")
    assert bob.reset("coder", "plan") == 0
    assert speak(bob, "plan", 8) == 7
    bob.forget("coder", "plan")
    thefts("no_such_conversation")
    assert alice.history("coder", "plan") == before
    assert speak(alice, "plan", 7) == 14
