"""What a broker process leaves to its successor: after SIGTERM, kill -9, a full disk, damage."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import pytest
from broker_process import BrokerProcess, RawClient, end, until

from vram_conductor.broker.journal import format as journal_format
from vram_conductor.broker.journal.opening import JOURNAL_NAME
from vram_conductor.broker.journal.records import BrokerEpoch
from vram_conductor.broker.journal.replay import encode
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.messages import Error, Tokens

PROMPT_TOKENS = 3
"""What RawClient.decode sends."""


def transcripts(client: RawClient) -> dict[tuple[str, str], tuple[int, int]]:
    """(agent, conversation) → (version, tokens)."""
    return {
        (agent.agent, state.conversation): (state.version, state.tokens)
        for agent in client.agents()
        for state in agent.conversations
    }


def journal(folder: Path) -> Path:
    return folder / "s" / JOURNAL_NAME


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_agents_and_conversations_outlive_the_broker(short_tmp: Path, how: signal.Signals) -> None:
    with BrokerProcess(short_tmp) as broker:
        broker.echo()
        client = broker.client()
        client.register("coder")
        client.register("writer", n_ctx=2048)
        client.register("brief", ephemeral=True)
        client.usage(client.decode("brief", pieces=3))
        client.usage(client.decode("coder", pieces=10))
        client.usage(client.decode("coder", pieces=5, continue_=True))
        client.usage(client.decode("coder", pieces=7, conversation="side"))
        before = transcripts(client)
        epoch = client.hello().broker_epoch
        broker.signal(how)
        broker.wait()
    coder = 2 * PROMPT_TOKENS + 10 + 5
    expected = {
        ("coder", "main"): (2, coder),
        ("coder", "side"): (1, PROMPT_TOKENS + 7),
        ("brief", "main"): (1, PROMPT_TOKENS + 3),
    }
    assert before == expected
    with BrokerProcess(short_tmp) as broker:
        client = broker.client()
        assert client.welcome is not None
        assert client.welcome.broker_epoch > epoch
        assert transcripts(client) == expected
        # A new worker has no transcript: it gets the broker's, whole, and checks its length.
        broker.echo()
        until(lambda: {a.state for a in client.agents()} == {"ready"}, "agents are loaded")
        # Ephemeral agents wait for their clients for a while.
        assert client.register("brief", ephemeral=True)["conversations"][0]["version"] == 1
        agents = {a.agent: a.n_ctx for a in client.agents()}
        assert agents == {"coder": 4096, "writer": 2048, "brief": 4096}
        rid = client.decode("coder", pieces=4, continue_=True, expect_version=2)
        assert client.usage(rid).prompt_tokens == coder + PROMPT_TOKENS
        assert transcripts(client)["coder", "main"] == (3, coder + PROMPT_TOKENS + 4)


def test_a_worker_that_outlives_the_broker_is_used_again(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as broker:
        worker = broker.echo(outlive=True)
        client = broker.client()
        client.register("coder")
        client.usage(client.decode("coder", pieces=10))
        broker.kill()
    with BrokerProcess(short_tmp) as broker:
        broker.stack.callback(end, worker)
        client = broker.client()
        until(lambda: client.workers() == {"cpu"}, "the old worker says READY again")
        until(lambda: {a.state for a in client.agents()} == {"ready"}, "agents are loaded")
        usage = client.usage(client.decode("coder", pieces=4, continue_=True))
        assert usage.prompt_tokens == 2 * PROMPT_TOKENS + 10
        assert worker.poll() is None


def test_kill_9_in_the_middle_of_a_reply_keeps_what_was_committed_before(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as broker:
        broker.echo(rate=50)
        client = broker.client()
        client.register("coder")
        client.usage(client.decode("coder", pieces=3))
        rid = client.decode("coder", pieces=1_000, continue_=True)
        for _ in range(5):
            client.expect(Tokens, rid)
        broker.kill()
    with BrokerProcess(short_tmp) as broker:
        client = broker.client()
        assert transcripts(client) == {("coder", "main"): (1, PROMPT_TOKENS + 3)}
        # Old request ids are gone; a resend is told so instead of decoding twice.
        broker.echo()
        rid = client.decode("coder", continue_=True, expect_version=0)
        error = client.expect(Error, rid).error
        assert (error.code, error.reason) == (Code.ABORTED, "version_mismatch")


def test_the_epoch_grows_even_if_the_clock_went_back(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as broker:
        assert broker.endpoints
    future = 2**62
    with journal(short_tmp).open("ab") as file:
        file.write(journal_format.frame(encode(BrokerEpoch(broker_epoch=future))))
    for count in (1, 2):
        with BrokerProcess(short_tmp) as broker:
            assert broker.client().hello().broker_epoch == future + count


def test_a_full_disk_is_shown_and_loses_nothing(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as broker:
        broker.echo()
        broker.limit_files(700)
        client = broker.client()
        client.register("coder")
        for _ in range(20):
            client.usage(client.decode("coder", pieces=8, continue_=True))
        trouble = client.status().journal_trouble
        assert "File too large" in trouble
        assert str(journal(short_tmp)) in trouble
        assert journal(short_tmp).stat().st_size <= 700
        expected = transcripts(client)
        assert expected == {("coder", "main"): (20, 20 * (PROMPT_TOKENS + 8))}
        # Somebody makes room.
        broker.limit_files(resource.RLIM_INFINITY)
        until(lambda: client.status().journal_trouble == "", "the journal recovers")
        assert "journal.recovered" in broker.log
        broker.kill()
    with BrokerProcess(short_tmp) as broker:
        assert transcripts(broker.client()) == expected


def test_a_damaged_journal_is_refused_until_told_otherwise(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as broker:
        broker.echo()
        client = broker.client()
        client.register("coder")
        client.register("writer")
        client.usage(client.decode("writer", pieces=8))
        broker.kill()
    path = journal(short_tmp)
    data = bytearray(path.read_bytes())
    data[data.index(b"coder")] ^= 0x20
    path.write_bytes(data)
    with BrokerProcess(short_tmp) as broker:
        assert broker.endpoints == {}
        assert broker.wait() == 65
        assert str(path) in broker.log
        assert re_offset(broker.log) > 0
        assert "--journal-skip-corrupt" in broker.log
    assert path.read_bytes() == bytes(data)
    with BrokerProcess(short_tmp, "--journal-skip-corrupt") as broker:
        client = broker.client()
        assert [agent.agent for agent in client.agents()] == ["writer"]
        assert transcripts(client) == {("writer", "main"): (1, PROMPT_TOKENS + 8)}
        assert "journal.skipped" in broker.log
    # Once is enough, and the damaged file is still there to be looked at.
    assert path.with_suffix(".corrupt-1").read_bytes() == bytes(data)
    with BrokerProcess(short_tmp) as broker:
        assert [agent.agent for agent in broker.client().agents()] == ["writer"]


def re_offset(log: str) -> int:
    return int(log.split("at offset ")[1].split(".")[0])


def test_a_journal_of_a_newer_version_is_refused(short_tmp: Path) -> None:
    (short_tmp / "s").mkdir(mode=0o700)
    journal(short_tmp).write_bytes(journal_format.header(99))
    with BrokerProcess(short_tmp) as broker:
        assert broker.wait() == 65
        assert "format 99" in broker.log


def test_a_killed_worker_is_noticed_at_once(short_tmp: Path) -> None:
    heartbeat = {"VRAM_CONDUCTOR_BROKER_HEARTBEAT_MS": "20000"}
    with BrokerProcess(short_tmp, env=heartbeat) as broker:
        worker = broker.echo(rate=50)
        client = broker.client()
        client.register("coder")
        rid = client.decode("coder", pieces=10_000)
        client.expect(Tokens, rid)
        start_s = time.monotonic()
        end(worker)
        error = client.expect(Error, rid).error
        assert time.monotonic() - start_s < 20, "not only after three heartbeats"
        assert isinstance(error, ErrorInfo)
        assert (error.code, error.reason, error.retryable) == (
            Code.UNAVAILABLE,
            "worker_lost",
            True,
        )
        client.ping()
