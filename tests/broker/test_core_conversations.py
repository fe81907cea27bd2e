"""RESET, FORK and HISTORY in the core: what is copied, kept, told, refused, and survives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_worker import Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.journal.records import ConversationCommitted, ConversationReset
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.conversations import ForkReceipt, HistoryPage, Turn
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.tokens import unpack_tokens
from vram_conductor.protocol.values import ConversationKey, Message

MAIN = ConversationKey("local", "coder", "main")
SIDE = ConversationKey("local", "coder", "side")


def setup(*agents: str, **fields: Any) -> tuple[Bench, ScriptedWorker, Client]:
    bench = Bench(config_of())
    worker = bench.worker()
    client = bench.client()
    for agent in agents or ("coder",):
        client.ok(client.register(agent, **fields))
    return bench, worker, client


def say(client: Client, worker: ScriptedWorker, text: str = "hi", **fields: Any) -> None:
    """One job, to its end."""
    rid = client.decode("coder", prompt=text, **fields)
    worker.finish(worker.job("coder", fields.get("conversation", "main")))
    client.done(rid)


def chat(client: Client, worker: ScriptedWorker, text: str, answer: str, **fields: Any) -> None:
    rid = client.bench.rid()
    given: dict[str, Any] = {"messages": [Message("user", text)], "continue_": True, **fields}
    client.send(m.Decode(rid=rid, agent="coder", **given))
    worker.finish(worker.job("coder"), answer)
    client.done(rid)


def forked(client: Client, to: str = "side", **fields: Any) -> ForkReceipt:
    return msgspec.convert(client.ok(client.fork("coder", to, **fields)), ForkReceipt)


def page(client: Client, conversation: str = "main", **fields: Any) -> HistoryPage:
    return msgspec.convert(client.ok(client.history("coder", conversation, **fields)), HistoryPage)


def texts(found: HistoryPage) -> list[tuple[str, str | None]]:
    return [(turn.role, turn.text) for turn in found.turns]


# --- copies -----------------------------------------------------------------------------------


def test_a_copy_has_the_transcript_and_a_version_of_its_own() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    say(client, worker, continue_=True)
    receipt = forked(client)
    assert receipt == ForkReceipt(
        conversation="side",
        version=1,
        tokens=10,
        source_version=2,
        kv="copied",
        kv_tokens=5,
        kv_bytes=500,
    )
    (copy,) = worker.all(c.Copy)
    assert (copy.source, copy.target) == (MAIN, SIDE)
    assert page(client, "side", from_token=0).ids == page(client, from_token=0).ids

    say(client, worker, conversation="side", continue_=True, expect_version=1)
    run = worker.all(c.Run)[-1]
    assert (run.conversation, run.version, run.transcript_tokens, run.n_raw) == (SIDE, 1, 10, 1)
    assert (page(client, "side").tokens, page(client).tokens) == (15, 10)
    say(client, worker, continue_=True, expect_version=2)
    assert (page(client, "side").version, page(client).version) == (2, 3)


def test_a_copy_does_not_wait_for_what_runs_and_is_of_the_last_that_is_over() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    client.decode("coder", continue_=True)
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "not yet", [99])
    receipt = forked(client)
    assert (receipt.tokens, receipt.source_version) == (5, 1)
    worker.done(job)
    assert page(client).tokens > page(client, "side").tokens == 5


def test_the_answer_waits_for_the_worker() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    worker.auto.discard(c.Copy)
    rid = client.fork("coder", "side")
    assert client.silent(rid)
    worker.answer(worker.held[-1])
    assert client.ok(rid)["kv"] == "copied"


@pytest.mark.parametrize("how", ["no_worker", "arena_full", "lost", "failed", "late"])
def test_a_copy_without_kv_is_whole_and_says_why(how: str) -> None:
    bench, worker, client = setup()
    say(client, worker)
    worker.auto.discard(c.Copy)
    if how == "no_worker":
        bench.kill(worker)
    rid = client.fork("coder", "side")
    reason = how
    match how:
        case "arena_full":
            reason = "not_copied: arena_full"
            worker.copied = {"reason": reason}
            worker.answer(worker.held[-1])
        case "lost":
            bench.kill(worker)
            reason = "worker_lost"
        case "failed":
            worker.fail(worker.held[-1], Code.NOT_FOUND, "unknown_agent")
            reason = "unknown_agent"
        case "late":
            bench.advance(30_000)
            reason = "worker_timeout"
        case _:
            pass
    receipt = msgspec.convert(client.ok(rid), ForkReceipt)
    assert (receipt.kv, receipt.kv_tokens, receipt.reason) == ("absent", 0, reason)
    assert page(client, "side").tokens == 5


def test_the_same_request_again_is_answered_once_more_and_does_nothing() -> None:
    bench, worker, client = setup()
    say(client, worker)
    worker.auto.discard(c.Copy)
    rid = client.fork("coder", "side")
    other = bench.client("c2")
    other.fork("coder", "side", rid=rid)
    worker.answer(worker.held[-1])
    assert client.silent(rid)
    first = other.ok(rid)
    third = bench.client("c3")
    third.fork("coder", "side", rid=rid)
    assert third.ok(rid) == first
    assert len(worker.all(c.Copy)) == 1
    say(client, worker, conversation="side", continue_=True)
    fourth = bench.client("c4")
    fourth.fork("coder", "side", rid=rid)
    assert fourth.error(rid).reason == "conversation_exists"


def test_what_is_there_is_not_overwritten() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    say(client, worker, conversation="side")
    error = client.error(client.fork("coder", "side"))
    assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "conversation_exists")
    assert error.details == {"conversation": "side", "version": 1, "tokens": 5}
    assert client.error(client.fork("coder", "main")).reason == "conversation_exists"
    client.decode("coder", conversation="new")
    assert client.error(client.fork("coder", "new")).reason == "conversation_exists"
    assert not worker.all(c.Copy)
    client.ok(client.reset("coder", "side"))
    assert forked(client).version == 3


def test_what_does_not_exist_cannot_be_copied_or_read() -> None:
    _bench, _worker, client = setup()
    for rid in (client.fork("coder", "side"), client.history("coder")):
        error = client.error(rid)
        assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_conversation")
        assert error.details == {"conversation": "main"}
    for rid in (client.fork("nobody", "side"), client.history("nobody")):
        assert client.error(rid).reason == "no_such_agent"


def test_versions_are_checked() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    for rid in (
        client.fork("coder", "side", expect_version=2),
        client.history("coder", expect_version=0),
    ):
        error = client.error(rid)
        assert (error.code, error.reason) == (Code.ABORTED, "version_mismatch")
        assert error.details["version"] == 1
    assert forked(client, expect_version=1).source_version == 1
    assert page(client, expect_version=1).version == 1


def test_there_are_only_so_many_and_the_refused_copy_leaves_nothing() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    for number in range(limits.CONVERSATIONS_PER_AGENT_MAX - 1):
        client.ok(client.fork("coder", f"c{number}"))
    error = client.error(client.fork("coder", "side"))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "too_many_conversations")
    assert error.details["limit"] == limits.CONVERSATIONS_PER_AGENT_MAX
    assert client.error(client.history("coder", "side")).reason == "no_such_conversation"
    client.ok(client.reset("coder", "c7", forget=True))
    assert forked(client).tokens == 5


def test_another_principal_finds_nothing() -> None:
    bench, worker, client = setup()
    say(client, worker, "a secret")
    thief = bench.client("thief", principal="mallory")
    for rid in (
        thief.history("coder"),
        thief.fork("coder", "mine"),
        thief.reset("coder", forget=True),
    ):
        error = thief.error(rid)
        assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_agent")
        assert "secret" not in repr(error)
    # A name of its own is another agent, with conversations of its own.
    thief.ok(thief.register("coder"))
    assert thief.error(thief.history("coder")).reason == "no_such_conversation"
    assert texts(page(client))[0] == ("", "a secret")


def test_the_same_rid_of_another_principal_is_another_request() -> None:
    bench, worker, client = setup()
    say(client, worker)
    rid = client.fork("coder", "side")
    client.ok(rid)
    other = bench.client("other", principal="other")
    other.register("coder")
    other.fork("coder", "side", rid=rid)
    assert other.error(rid).reason == "no_such_conversation"


# --- forgetting -------------------------------------------------------------------------------


def test_forgetting_takes_the_name_and_the_version() -> None:
    bench, worker, client = setup()
    say(client, worker, conversation="side")
    assert client.ok(client.reset("coder", "side", forget=True)) == {"version": 0}
    assert bench.records[-1] == ConversationReset(conversation=SIDE, version=0)
    assert worker.all(c.Forget)[-1].conversation == SIDE
    assert client.error(client.history("coder", "side")).reason == "no_such_conversation"
    assert client.ok(client.reset("coder", "side", forget=True)) == {"version": 0}
    say(client, worker, conversation="side", expect_version=0)
    assert page(client, "side").version == 1


def test_what_is_busy_is_not_forgotten() -> None:
    _bench, worker, client = setup()
    say(client, worker)
    client.decode("coder", continue_=True)
    assert client.error(client.reset("coder", forget=True)).reason == "conversation_busy"
    assert page(client).tokens == 5


# --- history ----------------------------------------------------------------------------------


def test_a_chat_is_told_with_roles() -> None:
    _bench, worker, client = setup()
    chat(client, worker, "hello", "hi there")
    chat(client, worker, "and?", "so")
    found = page(client)
    assert texts(found) == [
        ("user", "hello"),
        ("assistant", "hi there"),
        ("user", "and?"),
        ("assistant", "so"),
    ]
    assert [turn.generated for turn in found.turns] == [False, True, False, True]
    assert [turn.end for turn in found.turns] == [3, 5, 8, 10]
    assert (found.tokens, found.version, found.turns_total) == (10, 2, 4)
    assert (found.ids, found.next_turn, found.next_token) == ([], None, None)


def test_a_whole_conversation_keeps_the_turns_that_it_begins_with() -> None:
    bench, worker, client = setup()
    chat(client, worker, "hello", "hi there")
    again = [("user", "hello"), ("assistant", "hi there"), ("user", "more")]
    whole = [Message(*pair) for pair in again]
    chat(client, worker, "", "yes", messages=whole, continue_=False)
    record = bench.records[-1]
    assert isinstance(record, ConversationCommitted)
    assert (record.keep_turns, len(record.turns)) == (2, 2)
    assert texts(page(client)) == [*again, ("assistant", "yes")]
    chat(client, worker, "", "no", messages=[Message("user", "else")], continue_=False)
    assert texts(page(client)) == [("user", "else"), ("assistant", "no")]


def test_raw_input_has_no_role_and_tokens_have_no_text() -> None:
    _bench, worker, client = setup()
    say(client, worker, "Once upon")
    rid = client.bench.rid()
    client.send(m.Decode(rid=rid, agent="coder", tokens=[4, 5], continue_=True))
    worker.finish(worker.job("coder"), "more")
    found = page(client)
    assert [(turn.role, turn.text) for turn in found.turns[2:]] == [("", None), ("", "more")]
    assert texts(found)[0] == ("", "Once upon")


def test_a_job_that_is_stopped_is_told_as_far_as_it_came() -> None:
    bench, worker, client = setup()
    client.decode("coder", prompt="go")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "half ", [5])
    bench.kill(worker)
    assert page(client).turns[-1] == Turn(text="half ", generated=True, end=4)


def test_pages_hold_a_bounded_amount_and_fit_together() -> None:
    _bench, worker, client = setup()
    long = "x" * (limits.HISTORY_PAGE_BYTES_MAX // 3)
    for number in range(4):
        chat(client, worker, f"{number}{long}", "ok")
    seen: list[Turn] = []
    start = 0
    pages = 0
    while True:
        found = page(client, from_turn=start, expect_version=4)
        assert found.first_turn == start
        seen += found.turns
        pages += 1
        if found.next_turn is None:
            break
        start = found.next_turn
    assert pages > 1
    assert [turn.text[:1] for turn in seen if turn.text and turn.role == "user"] == list("0123")
    assert page(client, from_turn=10_000).turns == []


def test_ids_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    _bench, worker, client = setup()
    say(client, worker)
    monkeypatch.setattr(limits, "HISTORY_PAGE_TOKENS_MAX", 2)
    parts = [page(client, from_token=start) for start in (0, 2, 4)]
    assert [part.next_token for part in parts] == [2, 4, None]
    record = next(r for r in client.bench.records if isinstance(r, ConversationCommitted))
    assert [each for part in parts for each in part.ids] == unpack_tokens(record.ids)
    assert page(client, from_token=99).ids == []


def test_old_turns_and_very_long_ones_are_not_kept_but_their_ids_are() -> None:
    _bench, worker, client = setup()
    chat(client, worker, "y" * (limits.TURN_BYTES_MAX + 1), "ok")
    assert page(client).turns[0] == Turn(role="user", end=3)
    for _ in range(5):
        chat(client, worker, "z" * (limits.TURN_BYTES_MAX - 100), "ok")
    found = page(client)
    assert found.first_turn > 0
    assert found.turns_total == 12
    assert found.tokens == 30


# --- a restart --------------------------------------------------------------------------------


def test_copies_and_turns_survive_the_broker() -> None:
    bench, worker, client = setup()
    chat(client, worker, "hello", "hi")
    forked(client)
    chat(client, worker, "more", "yes")
    # The second restart is from a compact journal.
    for after in (once := bench.restart(), once.restart()):
        after.worker()
        asker = after.client()
        assert texts(page(asker, "side")) == [("user", "hello"), ("assistant", "hi")]
        assert page(asker, from_token=0) == page(client, from_token=0)
