"""What somebody waits for leaves before what takes a while."""

from __future__ import annotations

from core_driver import Driver, key
from fake_engine import ModelSpec

from vram_conductor.protocol.commands import RunTokens
from vram_conductor.worker.reporter import PATIENCE_NS, Reporter

MS = 1_000_000


def test_the_last_tokens_leave_before_the_state_is_parked() -> None:
    driver = Driver([ModelSpec("full")])
    driver.load("a", "full")
    seen: list[tuple[int, bool]] = []

    def hurry() -> None:
        said = [message for message, _ in driver.core.outbox._messages]
        tokens = sum(len(item.ids) for item in said if isinstance(item, RunTokens))
        seen.append((tokens, driver.store.meta(key("a")) is not None))

    driver.core.outbox.hurry = hurry
    op = driver.run("a", prompt="abc", max_tokens=1)
    driver.finish(op)
    assert seen == [(1, False)]
    assert driver.store.meta(key("a")) is not None


def test_somebody_waits_until_the_first_token_is_there() -> None:
    driver = Driver([ModelSpec("full")])
    driver.load("a", "full")
    assert not driver.core.urgent
    op = driver.run("a", prompt="abc", max_tokens=3)
    assert driver.core.urgent
    while not driver.attempts[op].ids:
        driver.step()
    assert not driver.core.urgent
    driver.finish(op)


def test_a_report_has_a_little_patience() -> None:
    reporter = Reporter(2000, min_ms=50)
    assert reporter.due(1, 0, urgent=True), "a new session is told at once"
    assert reporter.next_ns(2, 1) == 50 * MS
    assert reporter.next_ns(2, 1, urgent=True) == 50 * MS + PATIENCE_NS
    assert not reporter.due(2, 50 * MS, urgent=True)
    assert reporter.due(2, 50 * MS)
    assert reporter.due(3, 100 * MS + PATIENCE_NS, urgent=True)
