"""DECODE in the core: queue, run, stream, cancel, resume; exactly one terminal message."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from scripted_worker import Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.events import ClientFlow
from vram_conductor.broker.jobs.delivery import PIECES_AT_ONCE, PIECES_PER_TURN
from vram_conductor.broker.journal.records import ConversationCommitted
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.stream import SendStream
from vram_conductor.protocol.tokens import pack_tokens, unpack_tokens
from vram_conductor.protocol.values import ConversationKey, Sampling, Usage

MAIN = ConversationKey("local", "coder", "main")


def setup(*agents: str, **broker: Any) -> tuple[Bench, ScriptedWorker, Client]:
    bench = Bench(config_of(**broker))
    worker = bench.worker()
    client = bench.client()
    for agent in agents or ("coder",):
        client.ok(client.register(agent))
    return bench, worker, client


def version(bench: Bench, agent: str = "coder") -> int:
    status = next(a for a in bench.core.report(bench.now_ns).agents if a.agent == agent)
    return status.conversations[0].version if status.conversations else 0


def tokens(bench: Bench, agent: str = "coder") -> int:
    status = next(a for a in bench.core.report(bench.now_ns).agents if a.agent == agent)
    return status.conversations[0].tokens if status.conversations else 0


# --- what the answer must look like ------------------------------------------------------------


@pytest.mark.parametrize("structure", [{"grammar": "root ::= ."}, {"json_schema": {"items": {}}}])
def test_a_worker_that_would_ignore_a_grammar_is_not_asked(structure: dict[str, Any]) -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", **structure)
    error = client.error(rid)
    assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "no_structured_output")
    assert not worker.jobs
    # One that joins later and knows better is.
    bench.kill(worker)
    newer = bench.worker(ready=False)
    newer.ready(features=["structured_output", "telepathy"])
    client.decode("coder", **structure)
    run = newer.job("coder").run
    assert (run.grammar, run.json_schema) == (
        structure.get("grammar"),
        structure.get("json_schema"),
    )


# --- one job ----------------------------------------------------------------------------------


def test_decode_streams_and_ends_with_a_receipt() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    accepted = client.got(rid, m.Accepted)[0]
    assert (accepted.position, accepted.est_ms) == (0, None)
    job = worker.job("coder")
    bench.now_ns += 5_000_000
    worker.start(job, [1, 2, 3])
    bench.now_ns += 10_000_000
    worker.tokens(job, "he", [10])
    worker.tokens(job, "", [11])
    worker.tokens(job, "llo", [12])
    bench.now_ns += 20_000_000
    worker.done(job)
    assert client.text(rid) == "hello"
    usage = client.done(rid)
    assert (usage.queue_ms, usage.ttft_ms, usage.elapsed_ms) == (5.0, 15.0, 35.0)
    assert (usage.state_version, usage.generated_tokens) == (1, 3)
    assert client.got(rid, m.Done)[0].seq == 2
    record = bench.records[-1]
    assert isinstance(record, ConversationCommitted)
    assert (record.conversation, record.version, record.keep) == (MAIN, 1, 0)
    assert unpack_tokens(record.ids) == [1, 2, 3, 10, 11, 12]


def test_ids_travel_only_where_asked_for() -> None:
    _bench, worker, client = setup()
    rid = client.decode("coder", return_ids=True)
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    worker.tokens(job, "", [11])
    worker.done(job)
    assert [piece.ids for piece in client.got(rid, m.Tokens)] == [[10], [11]]


def test_run_carries_every_default_and_the_transcript_once() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("coder", sampling=Sampling(temperature=0.5, top_k=7), priority=3))
    client.decode("coder", sampling=Sampling(top_k=9))
    run = worker.all(c.Run)[0]
    assert (run.sampling.temperature, run.sampling.top_k, run.sampling.min_p) == (0.5, 9, 0.05)
    assert (run.priority, run.version, run.transcript_tokens, run.n_raw) == (3, 0, 0, 1)
    worker.finish(worker.job("coder"))
    client.decode("coder", continue_=True, priority=1)
    run = worker.all(c.Run)[1]
    assert (run.priority, run.version, run.transcript_tokens, run.n_raw) == (1, 1, 5, 0)
    assert run.continue_ is True


def test_worker_without_the_transcript_is_sent_it_and_the_attempt_does_not_count() -> None:
    bench, worker, client = setup()
    client.decode("coder")
    worker.finish(worker.job("coder"))
    worker.transcripts.clear()
    rid = client.decode("coder", continue_=True)
    runs = worker.all(c.Run)
    assert [run.n_raw for run in runs] == [1, 0, 1]
    assert runs[1].job == runs[2].job
    assert worker.job("coder").transcript == [1, 2, 3, 7, 8]
    worker.finish(worker.job("coder"))
    assert client.done(rid).state_version == 2
    assert tokens(bench) == 10


def test_prefix_is_replaced_where_the_worker_keeps_less() -> None:
    bench, worker, client = setup()
    client.decode("coder")
    worker.finish(worker.job("coder"))
    client.decode("coder", prompt="another")
    job = worker.job("coder")
    worker.start(job, [50, 51], keep=2)
    worker.finish(job, "x", [60])
    assert bench.records[-1] == ConversationCommitted(
        conversation=MAIN,
        version=2,
        keep=2,
        ids=pack_tokens([50, 51, 60]),
        turns=[Turn(text="another", end=4), Turn(text="x", generated=True, end=5)],
    )
    assert tokens(bench) == 5


def test_failure_before_the_first_token_changes_nothing() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.fail(job.run, Code.OUT_OF_RANGE, "context_overflow", prompt_tokens=9)
    error = client.error(rid)
    assert (error.reason, error.details["prompt_tokens"]) == ("context_overflow", 9)
    assert version(bench) == 0
    assert not [r for r in bench.records if isinstance(r, ConversationCommitted)]


def test_failure_after_the_first_token_keeps_what_was_emitted() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job, [1])
    worker.tokens(job, "a", [10])
    worker.fail(job.run, Code.RESOURCE_EXHAUSTED, "kv_full")
    assert client.error(rid).reason == "kv_full"
    error = client.got(rid, m.Error)[0]
    assert error.seq == 1
    assert (error.usage.generated_tokens, error.usage.state_version) == (1, 1)
    assert (version(bench), tokens(bench)) == (1, 2)


def test_unknown_agent_and_suspended_worker_are_named() -> None:
    _bench, _worker, client = setup()
    assert client.error(client.decode("nobody")).reason == "no_such_agent"


# --- queue ------------------------------------------------------------------------------------


def test_one_job_of_a_conversation_runs_and_the_others_follow_in_order() -> None:
    _bench, worker, client = setup()
    rids = [client.decode("coder", prompt=f"p{i}", priority=i) for i in range(3)]
    other = client.decode("coder", conversation="side")
    assert [a.position for rid in rids for a in client.got(rid, m.Accepted)] == [0, 1, 2]
    assert [run.prompt for run in worker.all(c.Run)] == ["p0", "x"]
    worker.finish(worker.job("coder"))
    worker.finish(worker.job("coder"))
    assert [r.prompt for r in worker.all(c.Run)] == ["p0", "x", "p1", "p2"]
    worker.finish(worker.job("coder"))
    worker.finish(worker.job("coder", "side"))
    for rid in (*rids, other):
        client.done(rid)


def test_worker_gets_so_many_at_once_and_the_most_important_next() -> None:
    _bench, worker, client = setup("a", "b", "d", worker_inflight=1)
    client.decode("a")
    low, high = client.decode("b", priority=0), client.decode("d", priority=5)
    assert len(worker.all(c.Run)) == 1
    worker.finish(worker.job("a"))
    worker.finish(worker.job("d"))
    client.done(high)
    assert client.silent(low)
    worker.finish(worker.job("b"))
    client.done(low)


def test_full_queue_says_when_to_come_back() -> None:
    bench, worker, client = setup("a", "b", queued_jobs_per_agent_max=2, queued_jobs_max=3)
    first = client.decode("a")
    bench.now_ns += 400_000_000
    worker.start(worker.job("a"))
    bench.now_ns += 300_000_000
    worker.finish(worker.job("a"))
    client.done(first)
    client.decode("a")
    for _ in range(2):
        client.decode("a")
    error = client.error(client.decode("a"))
    assert (error.code, error.reason, error.retryable) == (
        Code.RESOURCE_EXHAUSTED,
        "queue_full",
        True,
    )
    assert error.retry_after_ms == 300
    client.decode("b")
    client.decode("b")
    assert client.error(client.decode("b")).details["limit"] == 3


def test_estimate_of_the_wait_comes_from_recent_jobs() -> None:
    bench, worker, client = setup()
    client.decode("coder")
    worker.start(worker.job("coder"))
    bench.now_ns += 200_000_000
    worker.finish(worker.job("coder"))
    client.decode("coder")
    rid = client.decode("coder")
    assert client.got(rid, m.Accepted)[0].est_ms == 200


def test_request_for_another_model_leaves_the_running_job_alone() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("one", "small"))
    running = client.decode("one")
    job = worker.job("one")
    worker.start(job)
    worker.tokens(job, "a", [10])
    client.ok(client.register("two", "other"))
    second = client.decode("two")
    assert not worker.cancelled()
    worker.tokens(job, "b", [11])
    worker.done(job)
    assert client.text(running) == "ab"
    client.done(running)
    worker.finish(worker.job("two"))
    client.done(second)


# --- cancel -----------------------------------------------------------------------------------


def test_cancelling_a_queued_job_leaves_the_running_one_alone() -> None:
    _bench, worker, client = setup()
    running, queued = client.decode("coder"), client.decode("coder")
    client.send(m.Cancel(rid=queued))
    assert client.error(queued).code == Code.CANCELLED
    assert not worker.cancelled()
    worker.finish(worker.job("coder"))
    client.done(running)
    assert len(worker.all(c.Run)) == 1


def test_cancelling_a_running_job_ends_it_with_what_it_has() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    for _ in range(3):
        client.send(m.Cancel(rid=rid))
    assert worker.cancelled() == [job.run.op]
    assert client.silent(rid)
    worker.done(job, "cancelled")
    usage = client.done(rid)
    assert (usage.stop_reason, usage.state_version) == ("cancelled", 1)
    client.send(m.Cancel(rid=rid))
    client.done(rid)
    assert version(bench) == 1


def test_cancelling_before_the_first_token_rolls_back() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"))
    client.send(m.Cancel(rid=rid))
    worker.done(worker.job("coder"), "cancelled")
    assert client.error(rid).code == Code.CANCELLED
    assert version(bench) == 0


def test_job_that_finishes_before_the_cancel_arrives_is_done() -> None:
    _bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    client.send(m.Cancel(rid=rid))
    worker.tokens(job, "hi", [7, 8])
    worker.done(job)
    assert client.done(rid).stop_reason == "eos"


def test_cancel_of_an_unknown_rid_says_so() -> None:
    bench, _worker, client = setup()
    rid = bench.rid()
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).reason == "unknown_rid"


def test_cancel_that_the_worker_ignores_ends_all_the_same() -> None:
    bench, worker, client = setup()
    rid, behind = client.decode("coder"), client.decode("coder")
    worker.start(worker.job("coder"))
    client.send(m.Cancel(rid=rid))
    assert client.silent(rid)
    bench.advance(121_000)
    assert client.error(rid).code == Code.CANCELLED
    worker.finish(worker.job("coder"))
    client.done(behind)


# --- deadlines --------------------------------------------------------------------------------


def test_queue_deadline_drops_what_waits() -> None:
    bench, worker, client = setup()
    running, queued = client.decode("coder"), client.decode("coder", queue_ms=1000)
    worker.start(worker.job("coder"))
    bench.advance(1500)
    error = client.error(queued)
    assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "queue_timeout")
    worker.finish(worker.job("coder"))
    client.done(running)
    assert len(worker.all(c.Run)) == 1


def test_queue_deadline_does_not_touch_what_has_started() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", queue_ms=1000)
    worker.start(worker.job("coder"))
    bench.advance(1500)
    assert not worker.cancelled()
    worker.finish(worker.job("coder"))
    client.done(rid)


def test_queue_deadline_counts_at_the_worker_too() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", queue_ms=1000)
    bench.advance(1500)
    assert worker.cancelled() == [worker.job("coder").run.op]
    worker.done(worker.job("coder"), "cancelled")
    assert client.error(rid).reason == "queue_timeout"


def test_timeout_stops_a_running_job_and_keeps_its_tokens() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", timeout_ms=2000)
    job = worker.job("coder")
    assert job.run.timeout_ms == 2000
    worker.start(job)
    worker.tokens(job, "a", [10])
    bench.advance(2500)
    worker.done(job, "cancelled")
    error = client.error(rid)
    assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "timeout")
    assert version(bench) == 1


def test_first_reason_to_stop_is_the_one_that_is_told() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", timeout_ms=1000)
    client.send(m.Cancel(rid=rid))
    bench.advance(1500)
    worker.done(worker.job("coder"), "cancelled")
    assert client.error(rid).reason == "cancelled"


def test_deadline_is_checked_again_when_the_job_leaves_the_queue() -> None:
    bench, worker, client = setup()
    client.decode("coder")
    rid = client.decode("coder", timeout_ms=1000)
    bench.now_ns += 2_000_000_000
    # The tick is late: the worker's answer comes first.
    worker.finish(worker.job("coder"))
    assert client.error(rid).reason == "timeout"
    assert len(worker.all(c.Run)) == 1


# --- versions ---------------------------------------------------------------------------------


def test_expected_version_is_checked_when_the_job_would_start() -> None:
    _bench, worker, client = setup()
    first = client.decode("coder", expect_version=0)
    second = client.decode("coder", expect_version=0)
    third = client.decode("coder", expect_version=1)
    worker.finish(worker.job("coder"))
    client.done(first)
    error = client.error(second)
    assert (error.code, error.reason) == (Code.ABORTED, "version_mismatch")
    assert error.details == {"expected": 0, "version": 1}
    worker.finish(worker.job("coder"))
    assert client.done(third).state_version == 2


def test_reset_forgets_the_tokens_but_not_the_count() -> None:
    bench, worker, client = setup()
    client.decode("coder")
    assert client.error(client.reset("coder")).reason == "conversation_busy"
    worker.finish(worker.job("coder"))
    assert client.ok(client.reset("coder")) == {"version": 2}
    assert worker.all(c.Forget)[-1].conversation == MAIN
    assert (version(bench), tokens(bench)) == (2, 0)
    client.decode("coder", expect_version=2)
    run = worker.all(c.Run)[-1]
    assert (run.version, run.transcript_tokens, run.n_raw) == (2, 0, 1)
    assert client.ok(client.reset("coder", "never-used")) == {"version": 0}


# --- idempotency, credit, resume --------------------------------------------------------------


def test_same_decode_again_attaches_to_the_running_job() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    other = bench.client("c2")
    other.decode("coder", rid=rid)
    worker.tokens(job, "b", [11])
    worker.done(job)
    assert other.text(rid) == "ab"
    other.done(rid)
    assert client.text(rid) == "a"
    assert client.silent(rid)
    assert len(worker.all(c.Run)) == 1


def test_same_decode_again_replays_a_finished_job() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.finish(worker.job("coder"), "abc")
    other = bench.client("c2")
    other.decode("coder", rid=rid)
    assert other.text(rid) == "abc"
    other.done(rid)
    assert len(worker.all(c.Run)) == 1


def test_rid_of_another_decode_is_refused() -> None:
    _bench, worker, client = setup()
    rid = client.decode("coder")
    client.decode("coder", prompt="else", rid=rid)
    assert client.error(rid).reason == "rid_reused"
    worker.finish(worker.job("coder"))
    assert client.got(rid, m.Done)


def test_credit_holds_pieces_back_and_the_end_with_them() -> None:
    _bench, worker, client = setup()
    rid = client.decode("coder", window=1)
    job = worker.job("coder")
    worker.start(job)
    for text in "abc":
        worker.tokens(job, text, [10])
    worker.done(job)
    assert client.text(rid) == "a"
    assert client.silent(rid)
    client.send(m.Credit(rid=rid, ack=1, upto=2))
    client.send(m.Credit(rid=rid, ack=0, upto=1))
    assert client.text(rid) == "ab"
    client.send(m.Credit(rid=rid, ack=2, upto=9))
    assert client.text(rid) == "abc"
    client.done(rid)


def test_resume_after_a_lost_connection_loses_and_doubles_nothing() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    worker.tokens(job, "b", [11])
    client.gone()
    worker.tokens(job, "c", [12])
    assert not worker.cancelled()
    again = bench.client("c1-again")
    again.send(m.Resume(rid=rid, from_seq=1))
    worker.tokens(job, "d", [13])
    worker.done(job)
    assert [(p.seq, p.text) for p in again.got(rid, m.Tokens)] == [(1, "b"), (2, "c"), (3, "d")]
    again.done(rid)


def test_resumed_job_is_nobodys_orphan_any_more() -> None:
    bench, worker, client = setup(orphan_ms=1000)
    rid = client.decode("coder")
    worker.start(worker.job("coder"))
    client.gone()
    again = bench.client("again")
    again.send(m.Resume(rid=rid))
    bench.advance(3000)
    assert not worker.cancelled()
    worker.finish(worker.job("coder"))
    again.done(rid)


def test_credit_counts_from_the_connection_that_receives_the_stream() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", window=0)
    worker.finish(worker.job("coder"))
    bench.client("other").send(m.Credit(rid=rid, ack=0, upto=9))
    assert client.text(rid) == ""
    client.send(m.Credit(rid=rid, ack=0, upto=9))
    client.done(rid)


def test_resume_of_an_unknown_or_forgotten_job() -> None:
    bench, worker, client = setup(result_keep_ms=5000)
    rid = client.decode("coder")
    worker.finish(worker.job("coder"))
    bench.advance(6000)
    other = bench.client("c2")
    other.send(m.Resume(rid=rid))
    assert other.error(rid).reason == "unknown_rid"
    assert not list(bench.core._state.jobs)


def test_output_beyond_the_streams_bound_ends_as_length(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(SendStream, bytes_max=300)
    monkeypatch.setattr("vram_conductor.broker.jobs.job_desk.SendStream", small)
    _bench, worker, client = setup()
    rid = client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    for _ in range(5):
        worker.tokens(job, "x" * 100, [10])
    assert worker.cancelled() == [job.run.op]
    worker.done(job, "cancelled")
    assert client.done(rid).stop_reason == "length"
    assert set(client.text(rid)) == {"x"}


def long_job(worker: ScriptedWorker, client: Client, agent: str, pieces: int) -> bytes:
    """A job with so many pieces of output, fetched from now on without a limit."""
    rid = client.decode(agent, window=0)
    job = worker.job(agent)
    worker.start(job)
    for number in range(pieces):
        worker.tokens(job, f"{number} ", [10])
    worker.done(job)
    return rid


def test_long_reply_leaves_a_part_at_a_time() -> None:
    bench, worker, client = setup("coder", "writer")
    rids = [long_job(worker, client, agent, 2_000) for agent in ("coder", "writer")]
    for rid in rids:
        client.send(m.Resume(rid=rid))
        assert len(client.got(rid, m.Tokens)) == PIECES_AT_ONCE
    turns = 0
    while bench.core.next_deadline_ns() == bench.now_ns + 1:
        before = len(bench.inbox[client.peer])
        bench.turn()
        turns += 1
        assert 0 < len(bench.inbox[client.peer]) - before <= PIECES_PER_TURN + 2
        # Each gets its share.
        counts = [len(client.got(rid, m.Tokens)) for rid in rids]
        assert abs(counts[0] - counts[1]) <= PIECES_AT_ONCE
    assert turns > 5
    for rid in rids:
        assert client.text(rid) == "".join(f"{number} " for number in range(2_000))
        client.done(rid)


def test_live_output_stays_behind_what_waits_for_its_turn() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", window=0)
    job = worker.job("coder")
    worker.start(job)
    for number in range(200):
        worker.tokens(job, f"{number} ", [10])
    client.send(m.Credit(rid=rid, ack=0, upto=10_000))
    worker.tokens(job, "last", [11])
    worker.done(job)
    assert client.silent(rid)
    bench.turn()
    assert client.text(rid) == "".join(f"{number} " for number in range(200)) + "last"
    client.done(rid)


def test_client_that_is_behind_gets_no_more_until_it_has_caught_up() -> None:
    bench, worker, client = setup("coder", "writer")
    other = bench.client("other")
    rids = [client.decode("coder"), client.decode("writer")]
    free = other.decode("coder", conversation="free")
    bench.post(ClientFlow(client.peer, behind=True))
    for agent in ("coder", "writer"):
        job = worker.job(agent, "main")
        worker.start(job)
        for number in range(100):
            worker.tokens(job, f"{number} ", [10])
        worker.done(job)
    worker.finish(worker.job("coder", "free"))
    other.done(free)
    assert [client.text(rid) for rid in rids] == ["", ""]
    client.send(m.Ping(n=3))
    assert client.got(kind=m.Pong)
    bench.post(ClientFlow(client.peer, behind=False))
    bench.turn()
    for rid in rids:
        assert client.text(rid) == "".join(f"{number} " for number in range(100))
        client.done(rid)


def test_what_a_client_that_is_behind_never_got_can_be_retried() -> None:
    bench, old, client = setup()
    rid = client.decode("coder")
    bench.post(ClientFlow(client.peer, behind=True))
    old.start(old.job("coder"))
    old.tokens(old.job("coder"), "a", [10])
    bench.kill(old)
    new = bench.worker(epoch=2)
    new.finish(new.job("coder"), "b")
    bench.post(ClientFlow(client.peer, behind=False))
    bench.post(ClientFlow(b"a stranger", behind=False))
    bench.turn()
    assert client.text(rid) == "b"


# --- clients that go away ---------------------------------------------------------------------


@pytest.mark.parametrize("dead", [False, True])
def test_queued_job_of_a_dead_client_never_reaches_the_worker(dead: bool) -> None:
    bench, worker, client = setup()
    running = client.decode("coder")
    dying = bench.client("dying")
    queued = dying.decode("coder")
    dying.gone(dead=dead)
    worker.finish(worker.job("coder"))
    client.done(running)
    if not dead:
        bench.advance(limits.ORPHAN_MS)
    assert len(worker.all(c.Run)) == 1
    again = bench.client("again")
    again.send(m.Resume(rid=queued))
    error = again.error(queued)
    assert (error.reason, error.retryable) == ("client_gone", True)


def test_queued_job_keeps_its_place_while_its_client_is_away() -> None:
    bench, worker, client = setup()
    running = client.decode("coder")
    cut = bench.client("cut")
    first = cut.decode("coder")
    second = client.decode("coder")
    cut.gone()
    worker.finish(worker.job("coder"))
    client.done(running)
    (mine, other) = bench.core.report(bench.now_ns).jobs
    assert (mine.waiting, other.waiting) == ("client", "")
    bench.advance(limits.ORPHAN_MS - 1_000)
    again = bench.client("again")
    again.send(m.Resume(rid=first))
    worker.finish(worker.job("coder"), "mine")
    assert again.text(first) == "mine"
    worker.finish(worker.job("coder"), "next")
    assert client.text(second) == "next"


def test_job_that_computes_its_prompt_outlives_the_loss_of_its_connection() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    client.gone()
    assert not worker.cancelled()
    again = bench.client("again")
    again.send(m.Resume(rid=rid))
    worker.finish(worker.job("coder"), "here")
    assert again.text(rid) == "here"


def test_running_job_of_a_dead_client_is_stopped_after_a_while() -> None:
    bench, worker, client = setup(orphan_ms=3000)
    dying = bench.client("dying")
    dying.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    dying.gone()
    bench.advance(2500)
    assert not worker.cancelled()
    bench.advance(1000)
    assert worker.cancelled() == [job.run.op]
    worker.done(job, "cancelled")
    rid = client.decode("coder")
    worker.finish(worker.job("coder"))
    assert client.done(rid).state_version == 2


def test_running_job_of_a_dead_process_is_stopped_at_once() -> None:
    _bench, worker, client = setup("coder", "writer")
    client.decode("coder")
    client.decode("writer", detach=True)
    for agent in ("coder", "writer"):
        worker.start(worker.job(agent))
        worker.tokens(worker.job(agent), "a", [10])
    client.gone(dead=True)
    assert worker.cancelled() == [worker.job("coder").run.op]


def test_client_that_may_come_back_has_its_time() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"))
    client.gone()
    bench.advance(limits.ORPHAN_MS - 1_000)
    assert not worker.cancelled()
    again = bench.client("again")
    again.send(m.Resume(rid=rid))
    bench.advance(2_000)
    worker.finish(worker.job("coder"))
    again.done(rid)


@pytest.mark.parametrize("dead", [False, True])
def test_configured_time_counts_for_every_client(dead: bool) -> None:
    bench, worker, client = setup(orphan_ms=3_000)
    client.decode("coder")
    worker.start(worker.job("coder"))
    client.gone(dead=dead)
    bench.advance(2_500)
    assert not worker.cancelled()
    bench.advance(1_000)
    assert worker.cancelled()


def test_bye_stops_jobs_at_once() -> None:
    _bench, worker, client = setup()
    client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    client.send(m.Bye())
    assert worker.cancelled() == [job.run.op]


def test_detached_job_goes_on_and_can_be_fetched() -> None:
    bench, worker, client = setup(orphan_ms=1000)
    running = client.decode("coder", detach=True)
    queued = client.decode("coder", detach=True)
    client.send(m.Bye())
    bench.advance(5000)
    assert not worker.cancelled()
    worker.finish(worker.job("coder"), "one")
    worker.finish(worker.job("coder"), "two")
    other = bench.client("c2")
    for rid, text in ((running, "one"), (queued, "two")):
        other.send(m.Resume(rid=rid))
        assert other.text(rid) == text
        other.done(rid)


def test_unregister_ends_the_agents_jobs_and_no_others() -> None:
    _bench, worker, client = setup("coder", "writer")
    running, queued = client.decode("coder"), client.decode("coder")
    other = client.decode("writer")
    job = worker.job("coder")
    worker.start(job)
    client.ok(client.unregister("coder"))
    for rid in (running, queued):
        assert client.error(rid).reason == "agent_removed"
    assert worker.cancelled() == [job.run.op]
    worker.tokens(job, "late", [10])
    worker.done(job, "cancelled")
    assert client.text(running) == ""
    worker.finish(worker.job("writer"))
    client.done(other)


def test_conversations_of_an_agent_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.protocol.limits.CONVERSATIONS_PER_AGENT_MAX", 2)
    _bench, worker, client = setup()
    for name in ("one", "two"):
        client.decode("coder", conversation=name)
    error = client.error(client.decode("coder", conversation="three"))
    assert error.reason == "too_many_conversations"
    # A job that left nothing behind frees its conversation.
    job = worker.job("coder", "one")
    worker.fail(job.run, Code.INVALID_ARGUMENT, "bad_messages")
    client.decode("coder", conversation="three")
    worker.finish(worker.job("coder", "three"))


def test_reset_conversation_gives_its_place_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vram_conductor.protocol.limits.CONVERSATIONS_PER_AGENT_MAX", 2)
    bench, worker, client = setup()
    for name in ("one", "two"):
        rid = client.decode("coder", conversation=name)
        worker.finish(worker.job("coder", name))
        client.done(rid)
    error = client.error(client.decode("coder", conversation="three"))
    assert error.reason == "too_many_conversations"
    client.ok(client.reset("coder", "one"))
    # While there is room its version is kept, so that a late request is noticed.
    assert {
        c.conversation: c.version for c in bench.core.report(bench.now_ns).agents[0].conversations
    } == {
        "one": 2,
        "two": 1,
    }
    rid = client.decode("coder", conversation="three")
    worker.finish(worker.job("coder", "three"))
    client.done(rid)
    error = client.error(client.decode("coder", conversation="one"))
    assert error.reason == "too_many_conversations"
    late = bench.restart()
    agent = late.core.report(late.now_ns).agents[0]
    assert {c.conversation for c in agent.conversations} == {"two", "three"}


# --- workers that break the protocol ----------------------------------------------------------


def test_tokens_before_started_fail_that_job_only() -> None:
    bench, worker, client = setup("coder", "writer")
    rid, other = client.decode("coder"), client.decode("writer")
    worker.tokens(worker.job("coder"), "a", [10])
    assert client.error(rid).reason == "bad_worker_reply"
    worker.finish(worker.job("writer"))
    client.done(other)
    assert version(bench) == 0


@pytest.mark.parametrize("keep", [-1, 1])
def test_started_that_keeps_what_is_not_there_fails_the_job(keep: int) -> None:
    _bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"), [1], keep=keep)
    assert client.error(rid).reason == "bad_worker_reply"


def test_worker_that_lost_tokens_on_the_way_is_sent_the_transcript() -> None:
    _bench, worker, client = setup()
    client.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    usage = Usage(generated_tokens=2)
    worker.reply(job.run, c.RunDone, job=job.run.job, usage=usage)
    client.decode("coder")
    assert [run.n_raw for run in worker.all(c.Run)] == [1, 1]


def test_request_too_large_to_be_passed_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.protocol.limits.MAP_BYTES_MAX", 20_000)
    _bench, worker, client = setup()
    error = client.error(client.decode("coder", prompt="x" * 4000))
    assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "limit_exceeded")
    assert not worker.all(c.Run)
    client.decode("coder", prompt="x" * 3000)
    assert worker.all(c.Run)


def test_transcript_too_long_for_a_frame_is_an_error_of_that_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _bench, worker, client = setup()
    client.decode("coder")
    worker.finish(worker.job("coder"))
    monkeypatch.setattr("vram_conductor.protocol.limits.FRAME_BYTES_MAX", 16)
    error = client.error(client.decode("coder"))
    assert (error.reason, error.details) == ("transcript_too_long", {"tokens": 5, "limit": 4})
    client.ok(client.reset("coder"))
    rid = client.decode("coder")
    worker.finish(worker.job("coder"))
    client.done(rid)


def test_finished_results_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.broker.jobs.job.RESULTS_MAX", 2)
    bench, worker, client = setup()
    rids: list[bytes] = []
    for _ in range(3):
        rids.append(client.decode("coder"))
        worker.finish(worker.job("coder"))
    other = bench.client("c2")
    for rid in rids:
        other.send(m.Resume(rid=rid))
    assert other.error(rids[0]).reason == "unknown_rid"
    other.done(rids[1])
    other.done(rids[2])


# --- cut off ----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [0, 2])
@pytest.mark.parametrize("end", ["the worker's answer", "the deadline", "the worker's death"])
def test_a_job_that_the_brokers_end_cuts_off_says_what_is_kept(said: int, end: str) -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"), [1])
    for number in range(said):
        worker.tokens(worker.job("coder"), "a", [10 + number])
    bench.shut_down(1_000)
    if end == "the worker's answer":
        worker.done(worker.job("coder"), "cancelled")
    elif end == "the deadline":
        bench.advance(5_500)
    else:
        bench.kill(worker)
    error = client.error(rid)
    assert (error.reason, error.retryable) == ("draining", True)
    assert ("send the request again" in error.message) == (not said)
    assert ("2 tokens stay in the conversation" in error.message) == bool(said)
    assert error.details == ({"generated_tokens": said} if said else {})
