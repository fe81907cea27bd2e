"""Tokens that share messages: the first at once, in order, and none left behind."""

from __future__ import annotations

from typing import Any

import pytest
from core_driver import GREEDY, MS, Driver, LanesKind
from fake_engine import BOS, ModelSpec, reference

from vram_conductor.protocol.commands import Failed, RunDone, RunTokens, Started
from vram_conductor.protocol.errors import Internal
from vram_conductor.worker.streams import Joining

SPECS = [ModelSpec("full"), ModelSpec("window", rollback="window")]
LONG = next(
    text
    for text in (f"tell {number}" for number in range(1000))
    if len(reference(SPECS[0], [BOS, *text.encode()], 100, GREEDY)) == 100
)
"""A prompt that the model says much to."""


class Listening(Driver):
    """A driver that also keeps the messages."""

    def __init__(self, joining: Joining, lanes: LanesKind = "inline", **fields: Any) -> None:
        self.heard: list[tuple[int, Any]] = []
        super().__init__(SPECS, joining=joining, lanes=lanes, **fields)
        for spec in SPECS:
            self.load(spec.model, spec.model)

    def _collect_run(self, attempt: Any, data: Any, raw: list[bytes]) -> None:
        self.heard.append((self.device.now_ns, data))
        super()._collect_run(attempt, data, raw)

    def sizes_of(self, op: int) -> list[int]:
        """How many ids each message of a job had."""
        return [
            len(data.ids) for _, data in self.heard if isinstance(data, RunTokens) and data.op == op
        ]


@pytest.mark.parametrize("lanes", ["inline", "lockstep"])
def test_the_first_token_goes_at_once_and_the_others_by_four(lanes: LanesKind) -> None:
    driver = Listening(Joining(4), lanes)
    op = driver.run("full", prompt=LONG, max_tokens=15)
    attempt = driver.finish(op)[0]
    assert attempt.prompt is not None
    assert attempt.ids == reference(SPECS[0], attempt.prompt, 15, GREEDY)
    assert driver.sizes_of(op) == [1, 4, 4, 4, 2]
    kinds: list[type[object]] = [type(data) for _, data in driver.heard]
    assert (kinds[0], kinds[-1]) == (Started, RunDone)


def test_joined_or_not_the_text_is_the_same() -> None:
    texts: set[str] = set()
    for joining in (Joining(1), Joining(4), Joining(100)):
        driver = Listening(joining)
        driver.finish(driver.run("full", prompt=LONG, max_tokens=30))
        texts.add(next(iter(driver.attempts.values())).text)
    assert len(texts) == 1


def test_slow_tokens_go_one_by_one() -> None:
    driver = Listening(Joining(4, wait_ns=2 * MS))
    op = driver.run("full", prompt=LONG, max_tokens=10)
    driver.finish(op)
    assert driver.sizes_of(op) == [1] * 10


def test_nothing_waits_longer_than_it_should_though_no_token_follows() -> None:
    driver = Listening(Joining(4, wait_ns=40 * MS), slice_ms=1)
    driver.load("other", "full")
    op = driver.run("full", prompt=LONG, max_tokens=60)
    while len(driver.attempts[op].ids) < 1:
        driver.step()
    driver.step()
    job = next(iter(driver.core.jobs))
    assert driver.sizes_of(op) == [1]
    assert len(job.unsent) == 1
    sent_ns = job.sent_ns
    assert sent_ns is not None
    assert driver.core.wake_ns() == sent_ns + 40 * MS
    # Its device hangs: time alone sends what it has said.
    driver.engine.faults.decode = lambda batch: driver.device.spend(100)
    driver.step()
    driver.step()
    assert sum(driver.sizes_of(op)) >= 2
    driver.engine.faults.decode = lambda batch: None
    driver.finish(op)


@pytest.mark.parametrize("how", ["cancel", "error", "timeout"])
def test_what_was_said_is_sent_before_the_end(how: str) -> None:
    driver = Listening(Joining(4))
    op = driver.run("full", prompt=LONG, max_tokens=100, timeout_ms=60_000)
    while True:
        driver.step()
        job = next(iter(driver.core.jobs))
        if job.generated == 7:
            break
    assert sum(driver.sizes_of(op)) == 5
    if how == "cancel":
        driver.cancel(op)
    elif how == "timeout":
        driver.device.spend(60_000)
    else:

        def boom(slot: int) -> None:
            raise Internal("bad_logits", "no numbers")

        driver.engine.faults.sample = boom
    end = driver.finish(op)[0].end
    assert isinstance(end, RunDone if how == "cancel" else Failed)
    assert driver.sizes_of(op) == [1, 4, 2]
    assert end.usage is not None
    assert end.usage.generated_tokens == 7


def test_the_last_token_and_the_rest_of_the_text_share_a_message() -> None:
    driver = Listening(Joining(4))
    for number in range(60):
        op = driver.run(f"full/{number}", prompt=f"try {number}", max_tokens=60)
        attempt = driver.finish(op)[0]
        if attempt.done.usage.stop_reason == "eos" and len(attempt.ids) % 4 == 3:
            assert driver.sizes_of(op)[-1] == 2
            assert sum(driver.sizes_of(op)) == len(attempt.ids)
            return
    pytest.fail("no answer ended where it should")
