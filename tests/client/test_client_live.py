"""The client against a real broker and a real worker with a real model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuttable_proxy import CuttableProxy

from vram_conductor.client import (
    Aborted,
    AsyncConductor,
    Conductor,
    LedgerDeny,
    NotFound,
    OutOfRange,
    Unavailable,
)
from vram_conductor.client.stage import Stage, StageDevice

pytestmark = pytest.mark.real

MODEL = "smollm2-135m"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_S = 60.0


def eventually(check: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < until, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def stage(smollm2: Path) -> Iterator[Stage]:
    with Stage([StageDevice(capacity_bytes=220 << 20, threads=2)]) as stage:
        yield stage


@pytest.fixture
def conductor(stage: Stage) -> Iterator[Conductor]:
    with Conductor(stage.endpoint) as conductor:
        yield conductor
        for agent in conductor.list():
            conductor.unregister(agent.agent)


def test_a_conversation(conductor: Conductor) -> None:
    coder = conductor.register("coder", MODEL, n_ctx=512, temperature=0)
    assert coder.info is not None
    assert (coder.info.device, coder.info.n_ctx) == ("cpu", 512)
    reply = coder.chat("Say hello.", max_tokens=8, return_ids=True)
    pieces = list(reply)
    first = reply.result()
    assert "".join(pieces) == first.text
    assert len(first.ids) == first.usage.generated_tokens
    assert first.usage.prompt_tokens > 0
    second = coder.chat("Again.", max_tokens=4).result()
    assert second.usage.reused_tokens >= first.usage.prompt_tokens
    assert second.usage.state_version == first.usage.state_version + 1
    (status,) = conductor.list()
    assert status.conversations[0].version == second.usage.state_version
    assert conductor.status().devices[0].promised.promised_bytes > 0
    with pytest.raises(Aborted):
        coder.chat("Once more.", max_tokens=1, expect_version=77).result()
    assert coder.reset() > second.usage.state_version
    assert coder.chat("Say hello.", max_tokens=8).result().text == first.text


def test_raw_prompts_tokens_and_stop_strings(conductor: Conductor) -> None:
    agent = conductor.register("raw", MODEL, n_ctx=256, temperature=0)
    whole = agent.decode(prompt="1 2 3 4 5", max_tokens=12, return_ids=True).result()
    assert len(whole.ids) == 12
    assert whole.usage.stop_reason == "length"
    stop = whole.text.strip()[1:3]
    stopped = agent.decode(prompt="1 2 3 4 5", max_tokens=12, stop=stop).result()
    assert stopped.usage.stop_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    tokens = agent.decode(tokens=[1, 2, 3], max_tokens=2, return_ids=True).result()
    assert tokens.usage.prompt_tokens == 3


def test_refusals_are_typed_and_the_hint_is_admitted(conductor: Conductor) -> None:
    with pytest.raises(NotFound) as missing:
        conductor.register("x", "no-such-model")
    assert missing.value.reason
    with pytest.raises(OutOfRange) as beyond:
        conductor.register("x", MODEL, n_ctx=100_000)
    assert beyond.value.reason == "n_ctx_beyond_training"
    with pytest.raises(LedgerDeny) as deny:
        conductor.register("x", MODEL, n_ctx=8192)
    assert str(deny.value).startswith("VRAM_LEDGER_DENY code=CAP")
    assert "\n" not in str(deny.value)
    assert deny.value.details["requested_bytes"] > deny.value.details["ledger_max_bytes"]
    fits = deny.value.largest_n_ctx
    assert 0 < fits < 8192
    assert conductor.register("x", MODEL, n_ctx=fits).info is not None


def test_leaving_the_block_frees_the_device(conductor: Conductor) -> None:
    agent = conductor.register("a", MODEL, n_ctx=1024, temperature=0)
    with agent.decode(prompt="Once upon a time", max_tokens=900) as reply:
        next(reply)
    usage = reply.result().usage
    assert usage.stop_reason == "cancelled"
    assert 0 < usage.generated_tokens < 100
    eventually(lambda: conductor.status().jobs == [], "no job is left")


def test_a_network_that_breaks_in_mid_stream_loses_and_doubles_nothing(
    stage: Stage, conductor: Conductor, short_tmp: Path, rng: random.Random
) -> None:
    agent = conductor.register("a", MODEL, n_ctx=512, temperature=0)

    def tell(name: str, window: int | None, who: Conductor) -> str:
        reply = who.decode(
            "a", prompt="Once upon a time", max_tokens=48, window=window, conversation=name
        )
        return "".join(reply)

    expected = tell("c0", None, conductor)
    assert agent.name == "a"
    with (
        CuttableProxy(short_tmp / "p.ipc", stage.endpoint) as proxy,
        Conductor(proxy.endpoint) as cut,
    ):
        for index, window in enumerate((None, 1, 8, None), 1):
            # In the middle of a frame, somewhere in the reply, which may come in a few large
            # pieces where the machine is busy.
            proxy.cut_after(rng.randrange(100, 700))
            assert tell(f"c{index}", window, cut) == expected
            assert proxy.cuts == index


def test_many_replies_at_once(conductor: Conductor) -> None:
    names = ["a", "b", "c"]
    for name in names:
        conductor.register(name, MODEL, n_ctx=256, temperature=0, slots=3)
    jobs = [
        (number, conductor.decode(names[number % 3], prompt=f"{number} + 1 =", max_tokens=3))
        for number in range(30)
    ]
    texts = {number: reply.result(PATIENCE_S).text for number, reply in jobs}
    for number in (0, 7, 29):
        again = conductor.decode(names[number % 3], prompt=f"{number} + 1 =", max_tokens=3)
        assert again.result().text == texts[number]


def test_ephemeral_agents_go_with_their_conductor(stage: Stage, conductor: Conductor) -> None:
    with Conductor(stage.endpoint) as short:
        short.register("gone", MODEL, n_ctx=256, ephemeral=True)
        assert [agent.agent for agent in conductor.list()] == ["gone"]
    eventually(lambda: conductor.list() == [], "the ephemeral agent is gone")


def test_an_ephemeral_agent_survives_a_broken_connection(
    stage: Stage, conductor: Conductor, short_tmp: Path
) -> None:
    with (
        CuttableProxy(short_tmp / "p.ipc", stage.endpoint) as proxy,
        Conductor(proxy.endpoint) as short,
    ):
        agent = short.register("kept", MODEL, n_ctx=256, temperature=0, ephemeral=True)
        sessions = conductor.status().sessions
        proxy.cut()
        assert agent.decode(prompt="x", max_tokens=1).result().usage.generated_tokens == 1
        # The old session is noticed to be gone; the agent belongs to the new one by then.
        eventually(lambda: conductor.status().sessions <= sessions, "the old session is gone")
        assert agent.decode(prompt="x", max_tokens=1).result().usage.generated_tokens == 1


def test_asyncio(stage: Stage) -> None:
    async def main() -> None:
        async with AsyncConductor(stage.endpoint) as conductor:
            agent = await conductor.register("a", MODEL, n_ctx=512, temperature=0, ephemeral=True)
            pieces = [piece async for piece in agent.decode(prompt="1 2 3 4 5", max_tokens=8)]
            again = await agent.decode(prompt="1 2 3 4 5", max_tokens=8).result()
            assert again.text == "".join(pieces)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await agent.decode(prompt="Once upon a time", max_tokens=400).result()
            while (await conductor.status()).jobs:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize("name", ["three_agents.py", "async_agents.py"])
def test_examples(name: str, stage: Stage) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), MODEL],
        env={**os.environ, "VRAM_CONDUCTOR_CLIENTS": stage.endpoint},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 5


def test_a_restarted_broker(stage: Stage, conductor: Conductor) -> None:
    """Last: it kills the broker. Agents and conversations come back from its journal."""
    agent = conductor.register("a", MODEL, n_ctx=1024, temperature=0)
    before = agent.chat("Say hello.", max_tokens=4).result()
    epoch = conductor.broker_epoch
    reply = agent.decode(prompt="Once upon a time", max_tokens=900, conversation="long")
    next(reply)
    pid = broker_pid(stage)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable) as caught:
        reply.result(PATIENCE_S)
    assert caught.value.reason == "broker_restarted"
    assert caught.value.retryable
    assert caught.value.details["received_pieces"] >= 1
    assert reply.text
    assert conductor.broker_epoch > epoch
    answers: list[int] = []

    def ask() -> bool:
        """Until the workers are back the broker says UNAVAILABLE; nothing else is acceptable."""
        version = before.usage.state_version
        with contextlib.suppress(Unavailable):
            result = agent.chat("Again.", max_tokens=2, expect_version=version).result()
            answers.append(result.usage.state_version)
        return bool(answers)

    eventually(ask, "the conversation goes on")
    assert answers == [before.usage.state_version + 1]


def broker_pid(stage: Stage) -> int:
    """The process that runs the broker of this stage."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "vram_conductor.broker" in command and str(stage.config) in command:
            return int(entry.name)
    raise AssertionError("no broker process")
