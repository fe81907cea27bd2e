"""Answers that an orderly stop cuts off: whoever is stopped, and whenever, what is parked fits the
record, and nothing is computed again."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from conductor_up import Up
from scene import NO_END, WAIT_S, model, some_tokens, until

from vram_conductor.client import Conductor
from vram_conductor.protocol.errors import Unavailable

ROUNDS = 3
SEED = 20
DRAIN = "drain_ms = 150"

STOPS = ["up", "broker", "worker", "broker, worker", "worker, broker"]
"""Who gets SIGTERM, in this order."""


@pytest.mark.parametrize("who", STOPS)
def test_nothing_is_computed_again_after_a_stop_in_mid_answer(short_tmp: Path, who: str) -> None:
    chance = random.Random(f"{SEED} {who}")
    with ExitStack() as stack:
        up = stack.enter_context(Up(short_tmp, broker=DRAIN, worker=DRAIN))
        with Conductor(up.endpoint) as conductor:
            until(lambda: conductor.status().devices[0].worker, "there is a worker")
            conductor.register("a", model(), n_ctx=8192)
        for number in range(ROUNDS):
            after = chance.randrange(1, 200)
            sys.stdout.write(f"seed {SEED}, round {number}: {who} after {after} tokens\n")
            cut_off(up, who, number, after)
            if who == "up":
                up = stack.enter_context(Up(short_tmp, broker=DRAIN, worker=DRAIN))
            more(up, number)


def cut_off(up: Up, who: str, number: int, after: int) -> None:
    """Stop ``who`` after so many tokens."""
    with Conductor(up.endpoint) as conductor:
        worker = until(lambda: conductor.status().devices[0].worker, "there is a worker")
        assert worker is not None
        broker = next(child for child in up.children() if "broker" in " ".join(child.cmdline()))
        reply = conductor.decode(
            "a",
            tokens=some_tokens(20, number),
            conversation=f"talk-{number}",
            max_tokens=8000,
            logit_bias=NO_END,
            return_ids=True,
        )
        while len(reply.ids) < after:
            next(reply)
        pids = {"up": up.process.pid, "broker": broker.pid, "worker": worker.pid}
        for name in who.split(", "):
            os.kill(pids[name], signal.SIGTERM)
        with pytest.raises(Unavailable) as caught:
            reply.result(WAIT_S)
    assert caught.value.reason in ("draining", "worker_left")
    if who == "up":
        assert up.process.wait(WAIT_S) == 0


def more(up: Up, number: int) -> None:
    """Go on with what was cut off."""
    with Conductor(up.endpoint) as conductor:
        agent = until(lambda: conductor.status().agents, "the agents are known again")[0]
        talks = {talk.conversation: talk.tokens for talk in agent.conversations}
        tokens = talks[f"talk-{number}"]
        reply = conductor.decode(
            "a",
            tokens=some_tokens(20, 100 + number),
            continue_=True,
            conversation=f"talk-{number}",
            max_tokens=4,
            logit_bias=NO_END,
        )
        usage = reply.result(WAIT_S).usage
    # All that was said, but the last token: that was not computed yet.
    assert (usage.reused_tokens, usage.reprefilled_tokens) == (tokens - 1, 0), usage
    assert usage.prompt_tokens == tokens + 20
