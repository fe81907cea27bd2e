"""The core with a fake engine: single jobs, their receipts and their errors."""

from __future__ import annotations

from typing import Any

import pytest
from core_driver import GREEDY, Driver, Record, key
from fake_engine import EOG, N_VOCAB, FakePool, ModelSpec, reference

from vram_conductor.protocol.errors import Code, Internal, ResourceExhausted
from vram_conductor.protocol.plain import is_list
from vram_conductor.protocol.values import Message, Sampling

SPECS = [
    ModelSpec("full"),
    ModelSpec("window", rollback="window"),
    ModelSpec("chain", rollback="none"),
    ModelSpec("bare", template=False),
    ModelSpec("spaced", joins=False),
]


@pytest.fixture
def driver() -> Driver:
    one = Driver(SPECS)
    for spec in SPECS:
        one.load(spec.model, spec.model)
    return one


def test_a_job_gives_what_the_model_alone_gives(driver: Driver) -> None:
    attempt = driver.say("full", "<|user|>hello<|end|><|assistant|>", max_tokens=40)
    assert attempt.prompt is not None
    assert attempt.ids == reference(driver.specs["full"], attempt.prompt, 40, GREEDY)
    usage = attempt.done.usage
    assert usage.prompt_tokens == len(attempt.prompt)
    assert usage.reused_tokens == usage.reprefilled_tokens == 0
    assert attempt.done.where == "slot"
    assert attempt.done.parked_bytes > 0
    assert driver.records[key("full")].ids == attempt.prompt + attempt.ids


@pytest.mark.parametrize("model", ["full", "window", "chain"])
def test_turns_reuse_all_but_the_last_token(driver: Driver, model: str) -> None:
    for turn in range(5):
        before = len(driver.records[key(model)].ids) if turn else 0
        attempt = driver.say(model, f"<|user|>turn {turn}<|end|><|assistant|>")
        assert attempt.prompt is not None
        assert attempt.ids == reference(driver.specs[model], attempt.prompt, 8, GREEDY)
        assert attempt.done.usage.reused_tokens == max(0, before - 1)
        assert attempt.done.usage.reprefilled_tokens == 0
        assert attempt.keep == before


def test_messages_reuse_the_history_as_text(driver: Driver) -> None:
    messages = [Message("user", "abcd abcd")]
    for _ in range(4):
        op = driver.run("full", messages=list(messages))
        attempt = driver.finish(op)[0]
        had = len(driver.records[key("full")].ids) - len(attempt.ids)
        assert attempt.done.usage.reprefilled_tokens == 0
        assert attempt.prompt is not None
        assert len(attempt.prompt) == had
        assert attempt.ids == reference(driver.specs["full"], attempt.prompt, 8, GREEDY)
        messages += [Message("assistant", attempt.text), Message("user", "more")]
    assert attempt.done.usage.reused_tokens > 0
    assert attempt.done.usage.reused_tokens >= attempt.keep - 1


def test_sampling_is_reproducible_and_reports_its_seed(driver: Driver) -> None:
    warm = Sampling(temperature=0.7, repeat_penalty=1.1, penalty_last_n=5, seed=99)
    one = driver.say("full/one", "abc", sampling=warm, max_tokens=20)
    two = driver.say("full/two", "abc", sampling=warm, max_tokens=20)
    assert one.ids == two.ids
    assert one.prompt is not None
    assert one.ids == reference(driver.specs["full"], one.prompt, 20, warm, seed=99)
    drawn = driver.say("full/three", "abc", sampling=Sampling(temperature=0.7))
    assert (one.done.usage.seed, drawn.done.usage.seed) == (99, 4242)


def test_a_stop_string_ends_the_job_and_is_not_shown(driver: Driver) -> None:
    whole = driver.say("full/one", "abc", max_tokens=30).text
    stop = whole[10:13]
    attempt = driver.say("full/two", "abc", max_tokens=30, stop=[stop])
    assert attempt.text == whole[: whole.index(stop)]
    assert attempt.done.usage.stop_reason == "stop"


def test_the_end_token_is_in_the_transcript_and_not_in_the_text(driver: Driver) -> None:
    for turn in range(50):
        attempt = driver.say(f"full/{turn}", f"try {turn}", max_tokens=60)
        if attempt.done.usage.stop_reason == "eos":
            assert attempt.ids[-1] == EOG
            assert "end" not in attempt.text
            assert driver.records[key(f"full/{turn}")].ids[-1] == EOG
            return
    pytest.fail("the fake model never ends")


def test_the_same_prompt_again_computes_one_token(driver: Driver) -> None:
    op = driver.run("full", prompt="a b c d e")
    first = driver.finish(op)[0]
    again = driver.finish(driver.run("full", prompt="a b c d e"))[0]
    assert again.ids == first.ids
    assert again.keep == len(again.prompt or [])
    assert again.done.usage.reused_tokens == len(again.prompt or []) - 1
    assert again.done.usage.reprefilled_tokens == 0


def test_an_empty_continuation_goes_on(driver: Driver) -> None:
    first = driver.say("full", "abcd", max_tokens=5)
    assert first.done.usage.stop_reason == "length"
    second = driver.say("full", "", max_tokens=5)
    assert first.prompt is not None
    both = reference(driver.specs["full"], first.prompt, 10, GREEDY)
    assert first.ids + second.ids == both
    assert second.done.usage.reused_tokens == second.done.usage.prompt_tokens - 1


@pytest.mark.parametrize(("model", "reason"), [("window", "window"), ("chain", "recurrent")])
def test_what_cannot_be_rolled_back_is_computed_again_and_said(
    driver: Driver, model: str, reason: str
) -> None:
    first = driver.finish(driver.run(model, prompt="abcdefgh ijklmnop qrstuv", max_tokens=20))[0]
    again = driver.finish(driver.run(model, prompt="abcdefgh xyz", max_tokens=20))[0]
    assert again.prompt is not None
    assert again.ids == reference(driver.specs[model], again.prompt, 20, GREEDY)
    usage = again.done.usage
    assert usage.reused_tokens == 0
    assert usage.reprefilled_tokens == again.keep > 0
    assert usage.reprefill_reason == f"rollback_{reason}"
    assert first.done.usage.reprefill_reason == ""


def test_a_window_rolls_back_as_far_as_it_reaches(driver: Driver) -> None:
    first = driver.finish(driver.run("window", prompt="a b c d e f g h i j k", max_tokens=2))[0]
    again = driver.finish(driver.run("window", prompt="a b c d e f g h i j k", max_tokens=2))[0]
    assert first.ids == again.ids
    assert again.done.usage.reused_tokens == len(again.prompt or []) - 1


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"prompt": ""}, Code.INVALID_ARGUMENT, "empty_prompt"),
        ({"messages": []}, Code.INVALID_ARGUMENT, "empty_prompt"),
        ({"tokens": []}, Code.INVALID_ARGUMENT, "empty_prompt"),
        ({}, Code.INVALID_ARGUMENT, "bad_input"),
        ({"prompt": "a", "tokens": [1]}, Code.INVALID_ARGUMENT, "bad_input"),
        ({"tokens": [1, N_VOCAB]}, Code.INVALID_ARGUMENT, "bad_tokens"),
        ({"tokens": [-1]}, Code.INVALID_ARGUMENT, "bad_tokens"),
        ({"tokens": [2**40]}, Code.INVALID_ARGUMENT, "bad_tokens"),
        ({"prompt": "a" * 500}, Code.OUT_OF_RANGE, "prompt_too_long"),
        ({"prompt": "a", "max_tokens": 0}, Code.INVALID_ARGUMENT, "bad_max_tokens"),
        ({"prompt": "a", "sampling": Sampling(seed=-1)}, Code.INVALID_ARGUMENT, "bad_seed"),
        ({"prompt": "a", "sampling": Sampling(top_k=-1)}, Code.INVALID_ARGUMENT, "bad_sampling"),
    ],
)
def test_bad_input_is_refused_at_once_and_changes_nothing(
    driver: Driver, fields: dict[str, Any], code: Code, reason: str
) -> None:
    good = driver.say("full", "hello")
    record = list(driver.records[key("full")].ids)
    attempt = driver.attempts[driver.run("full", **fields)]
    assert attempt.failed.error.code == code
    assert attempt.failed.error.reason == reason
    assert driver.records[key("full")].ids == record
    after = driver.say("full", " more")
    assert after.done.usage.reused_tokens == len(record) - 1
    assert after.done.usage.reprefilled_tokens == 0
    assert good.done.usage.state_version + 1 == after.done.usage.state_version


def test_overflow_says_the_numbers(driver: Driver) -> None:
    attempt = driver.attempts[driver.run("full", prompt="x" * 300)]
    assert attempt.failed.error.details == {"prompt_tokens": 301, "n_ctx": 200}


def test_a_full_context_ends_the_answer_with_length(driver: Driver) -> None:
    driver.load("small", "full", n_ctx=20)
    for attempt in range(20):
        name = f"small/{attempt}"
        done = driver.finish(driver.run(name, prompt=f"abc {attempt}", max_tokens=None))[0]
        if done.done.usage.stop_reason == "length":
            assert len(driver.records[key(name)].ids) == 20
            more = driver.attempts[driver.run(name, prompt="a", continue_=True)]
            assert more.failed.error.reason == "prompt_too_long"
            return
    pytest.fail("every answer ended by itself")


def test_messages_to_a_model_without_a_template(driver: Driver) -> None:
    attempt = driver.attempts[driver.run("bare", messages=[Message("user", "hi")])]
    assert attempt.failed.error.code == Code.FAILED_PRECONDITION
    assert attempt.failed.error.reason == "no_chat_template"


def test_an_unknown_agent_and_a_busy_conversation(driver: Driver) -> None:
    unknown = driver.attempts[driver.run("nobody", prompt="a")]
    assert unknown.failed.error.reason == "unknown_agent"
    first = driver.run("full", prompt="a")
    second = driver.attempts[driver.run("full", prompt="a")]
    assert second.failed.error.reason == "conversation_busy"
    assert driver.finish(first)[0].done


def test_a_missing_transcript_is_asked_for(driver: Driver) -> None:
    driver.say("full", "hello")
    record = driver.records[key("full")]
    record.version += 1
    record.sent_version = record.version
    attempt = driver.attempts[driver.run("full", prompt="a", continue_=True)]
    assert attempt.failed.error.reason == "transcript_missing"
    assert attempt.failed.error.retryable
    again = driver.finish(driver.run("full", full=True, prompt="a", continue_=True))[0]
    assert again.done.usage.reused_tokens == len(record.ids) - len(again.ids) - 2


def test_a_transcript_that_is_nonsense_is_refused(driver: Driver) -> None:
    record = driver.records.setdefault(key("full"), Record())
    record.ids, record.version = [1, N_VOCAB + 3], 1
    attempt = driver.attempts[driver.run("full", prompt="a", continue_=True)]
    assert attempt.failed.error.reason == "bad_transcript"
    assert driver.say("window", "still here").done


def test_appended_messages_close_the_turn_before(driver: Driver) -> None:
    first = driver.finish(driver.run("full", messages=[Message("user", "hi")], max_tokens=3))[0]
    assert first.done.usage.stop_reason == "length"
    op = driver.run("full", continue_=True, messages=[Message("user", "go on")])
    second = driver.finish(op)[0]
    assert second.prompt is not None
    model = driver.core.residency.weights["full"].handle
    assert model is not None
    text = b"".join(model.piece(token, special=True) for token in second.prompt).decode()
    assert text == f"<s><|user|>hi<|end|>\n<|assistant|>{first.text}<|end|>\n<|user|>go on" + (
        "<|end|>\n<|assistant|>"
    )
    assert second.done.usage.reprefilled_tokens == 0


def test_a_failed_decode_harms_only_the_job_that_causes_it() -> None:
    driver = Driver([ModelSpec("full")])
    driver.load("one", "full", slots=2)
    driver.load("two", "full", slots=2)
    good, bad = driver.run("one", prompt="abcd"), driver.run("two", prompt="zzzz")

    def fail(batch: object) -> None:
        assert is_list(batch)
        if any(ord("z") in ids.tolist() for _, ids, _, _ in batch):
            raise Internal("decode_failed", "boom")

    driver.engine.faults.decode = fail
    first, second = driver.finish(good, bad)
    assert second.failed.error.reason == "decode_failed"
    assert first.prompt is not None
    assert first.ids == reference(driver.specs["full"], first.prompt, 8, GREEDY)
    assert driver.say("one", "more").done.usage.reprefilled_tokens == 0
    driver.engine.faults.decode = lambda batch: None
    assert driver.say("two", "abc").done


def test_logits_that_are_no_numbers_end_only_that_job_and_spoil_nothing() -> None:
    driver = Driver([ModelSpec("full")])
    for name in ("one", "two"):
        driver.load(name, "full", slots=2)
        driver.say(name, "ab")
    good = driver.run("one", prompt="cd", continue_=True, max_tokens=12)
    bad = driver.run("two", prompt="cd", continue_=True, max_tokens=12)
    pool = driver.core.residency.pools["full@f16"]
    before = driver.store.meta(key("two"))
    broken = pool.handle

    def spoil(slot: int) -> None:
        conversation = pool.slots[slot].conversation
        if conversation and conversation.key == key("two") and len(driver.attempts[bad].ids) == 3:
            raise Internal("bad_logits", "no numbers")

    driver.engine.faults.sample = spoil
    first, second = driver.finish(good, bad)
    driver.engine.faults.sample = lambda slot: None
    assert second.failed.error.reason == "bad_logits"
    assert len(second.ids) == 3
    assert isinstance(broken, FakePool)
    assert not broken.open
    # What was parked in mid-answer is not of the spoilt cache.
    assert driver.store.meta(key("two")) == before
    assert first.prompt is not None
    assert first.ids == reference(driver.specs["full"], first.prompt, 12, GREEDY)
    assert first.done.usage.reprefilled_tokens == 0
    after = driver.say("two", "more")
    assert after.prompt is not None
    assert after.ids == reference(driver.specs["full"], after.prompt, 8, GREEDY)
    assert after.done.usage.reprefill_reason == "bad_logits"


def test_a_timeout_keeps_what_was_said(driver: Driver) -> None:
    op = driver.run("full", prompt="abc", max_tokens=100, timeout_ms=20)
    attempt = driver.finish(op)[0]
    assert attempt.failed.error.code == Code.DEADLINE_EXCEEDED
    assert attempt.failed.error.details["generated_tokens"] == len(attempt.ids) > 0
    after = driver.say("full", "more")
    assert after.done.usage.reprefilled_tokens == 0
    assert after.prompt is not None
    assert after.ids == reference(driver.specs["full"], after.prompt, 8, GREEDY)


def test_running_out_of_cells_ends_only_the_job_that_overflows() -> None:
    """The library may need more cells than tokens; then jobs of one pool run one by one."""
    driver = Driver([ModelSpec("full")])
    driver.load("one", "full", slots=2)
    driver.load("two", "full", slots=2)
    pool = driver.core.residency.pools["full@f16"]

    def narrow(batch: object) -> None:
        assert is_list(batch)
        assert isinstance(pool.handle, FakePool)
        held = sum(cache.count for cache in pool.handle.caches)
        if held + sum(len(ids) for _, ids, _, _ in batch) > 60:
            raise ResourceExhausted("kv_full", "no cells")

    driver.engine.faults.decode = narrow
    ops = [driver.run(name, prompt="abcd" * 12, max_tokens=10) for name in ("one", "two")]
    driver.finish(*ops, steps=200)
    for op in ops:
        attempt = driver.attempts[op]
        assert attempt.prompt is not None
        assert attempt.done.usage.reprefilled_tokens == 0
        assert attempt.ids == reference(driver.specs["full"], attempt.prompt, 10, GREEDY)
    alone = driver.run("one", prompt="xyz " * 16, max_tokens=10)
    attempt = driver.finish(alone)[0]
    assert attempt.failed.error.reason == "kv_full"
    driver.engine.faults.decode = lambda batch: None
    assert driver.say("two", "more").done.usage.reprefilled_tokens == 0
