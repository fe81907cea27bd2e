"""Failures of a device and failures of a job (F4)."""

from __future__ import annotations

import pytest
from core_driver import Driver, LanesKind
from fake_engine import ModelSpec

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.plain import is_list
from vram_conductor.worker.health import FAILURES_MAX, Health

MODELS = [ModelSpec("full"), ModelSpec("window", rollback="window")]


def test_failures_of_several_jobs_in_a_row_are_the_devices() -> None:
    health = Health()
    for count in range(1, FAILURES_MAX + 1):
        assert not health.broken
        health.failed([count])
        assert health.failures == count
    assert health.broken


def test_one_job_can_fail_as_often_as_it_likes() -> None:
    health = Health()
    for _ in range(20):
        health.failed([1])
    assert not health.broken


def test_a_success_in_between_starts_anew() -> None:
    health = Health()
    for job in range(20):
        health.failed([job])
        health.failed([job])
        assert not health.broken
        health.good()
    assert health.failures == 0


def broken(batch: object) -> None:
    raise Internal("decode_failed", "the context is poisoned")


@pytest.mark.parametrize("kind", ["inline", "lockstep"])
def test_a_core_on_a_dead_device_gives_up(kind: LanesKind) -> None:
    driver = Driver(MODELS, lanes=kind)
    for model in ("full", "window"):
        driver.load(model, model)
        driver.say(model, "abcd")
    driver.engine.faults.decode = broken
    ops = [driver.run(model, prompt="efgh", continue_=True) for model in ("full", "window")]
    for _ in range(FAILURES_MAX + 1):
        if not driver.core.broken:
            driver.step()
    assert driver.core.broken
    # Whoever has seen nothing yet is not told that it failed: the next process can do it.
    assert sum(driver.attempts[op].end is not None for op in ops) < len(ops)
    driver.engine.faults.decode = lambda batch: None
    driver.restart_worker()
    for model in ("full", "window"):
        assert driver.say(model, "efgh").done.usage.reprefilled_tokens == 0


def test_one_client_that_tries_again_and_again_is_believed_at_the_second_time() -> None:
    driver = Driver(MODELS)
    driver.load("full", "full")
    driver.engine.faults.decode = broken
    first = driver.say("full", "abcd")
    assert first.failed.error.reason == "decode_failed"
    assert not driver.core.broken
    driver.run("full", prompt="abcd")
    driver.step()
    assert driver.core.broken


def test_a_job_that_breaks_every_batch_ends_and_the_process_lives() -> None:
    driver = Driver(MODELS)
    for name in ("good", "bad"):
        driver.load(name, "full", slots=2)

    def fail(batch: object) -> None:
        assert is_list(batch)
        if any(ord("z") in ids.tolist() for _, ids, _, _ in batch):
            raise Internal("decode_failed", "boom")

    driver.engine.faults.decode = fail
    for _ in range(5):
        good = driver.run("good", prompt="abcd", max_tokens=3)
        bad = driver.run("bad", prompt="zzzz")
        driver.finish(good, bad)
        assert driver.attempts[good].done
        assert driver.attempts[bad].failed.error.reason == "decode_failed"
    assert not driver.core.broken


def test_a_full_pool_is_no_failure_of_the_device() -> None:
    driver = Driver(MODELS)
    driver.load("full", "full")

    def full(batch: object) -> None:
        raise ResourceExhausted("kv_full", "no cells")

    driver.engine.faults.decode = full
    for _ in range(2 * FAILURES_MAX):
        assert driver.say("full/main", "abcd").failed.error.reason == "kv_full"
    assert not driver.core.broken
