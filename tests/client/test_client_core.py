"""The client's state machine, with a clock of its own and no socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from vram_conductor.client.core import ClientCore
from vram_conductor.client.effects import (
    Answered,
    Connect,
    Down,
    Effect,
    Failed,
    Finished,
    News,
    Opened,
    Output,
    Queued,
    Warn,
)
from vram_conductor.client.session import MS, Phase, Session, Timing
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    DeadlineExceeded,
    ErrorInfo,
    InvalidArgument,
    Unavailable,
    Unimplemented,
)
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.values import Usage

RID = bytes(range(16))
M = TypeVar("M", bound=Base)
E = TypeVar("E")


class Driver:
    """A core with a clock; what it sends and does is kept until asked for."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.now_ns = 1_000 * MS
        self.core = ClientCore("ipc:///x", "test", timing)
        self.effects: list[Effect] = []

    def do(self, effects: list[Effect]) -> list[Effect]:
        self.effects += effects
        return effects

    def sent(self) -> list[wire.ClientMessage]:
        sent = list(self.core.outgoing)
        self.core.outgoing.clear()
        return sent

    def get(self, *messages: wire.BrokerMessage) -> list[Effect]:
        effects: list[Effect] = []
        for message in messages:
            effects += self.core.handle(message, self.now_ns)
        return self.do(effects)

    def welcome(
        self, epoch: int = 1, heartbeat_ms: int = 1_000, features: Sequence[str] = ()
    ) -> list[Effect]:
        return self.get(
            wire.Welcome(
                v=(1, 0),
                session="s",
                broker_epoch=epoch,
                principal="local",
                heartbeat_ms=heartbeat_ms,
                features=list(features),
            )
        )

    def open(self, epoch: int = 1, heartbeat_ms: int = 1_000_000) -> None:
        """Connected; so long a heartbeat that it plays no part."""
        self.do(self.core.dial(self.now_ns))
        self.welcome(epoch, heartbeat_ms)
        self.sent()

    def reconnect(self, epoch: int = 1) -> list[Effect]:
        self.do(self.core.lost(self.now_ns))
        assert self.sent() == [self.hello()]
        return self.welcome(epoch, 1_000_000)

    def hello(self) -> wire.Hello:
        return wire.Hello(v=(1, 0), client="test")

    def decode(self, **fields: object) -> list[Effect]:
        decode = wire.Decode(rid=RID, agent="a", prompt="x", **fields)  # type: ignore[arg-type]
        return self.do(self.core.decode(decode, 1_000, self.now_ns))

    def wait(self, ms: float) -> list[Effect]:
        """Let time pass, ticking whenever the core asks for it."""
        until_ns = self.now_ns + round(ms * MS)
        effects: list[Effect] = []
        for _ in range(10_000):
            due_ns = self.core.next_ns()
            if due_ns is None or due_ns > until_ns:
                break
            self.now_ns = max(self.now_ns, due_ns)
            effects += self.core.tick(self.now_ns)
        else:
            raise AssertionError("the core asks for ticks without end")
        self.now_ns = until_ns
        return self.do(effects)


def only(effects: list[Effect], kind: type[E]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def tokens(*seqs: int) -> list[wire.Tokens]:
    return [wire.Tokens(rid=RID, seq=seq, text=f"<{seq}>") for seq in seqs]


def done(seq: int) -> wire.Done:
    return wire.Done(rid=RID, seq=seq, usage=Usage(generated_tokens=seq))


def text(effects: list[Effect]) -> str:
    return "".join(effect.text for effect in effects if isinstance(effect, Output))


def error(code: Code, reason: str, rid: bytes = RID) -> wire.Error:
    return wire.Error(rid=rid, error=ErrorInfo(code, reason, "because"))


# --- connecting -------------------------------------------------------------------------------


def test_dial_sends_hello_on_a_fresh_socket() -> None:
    it = Driver()
    assert it.core.dial(it.now_ns) == [Connect()]
    assert it.sent() == [it.hello()]
    assert it.core.dial(it.now_ns) == []
    assert it.welcome() == [Opened("s", 1)]
    assert it.core.phase is Phase.OPEN


@pytest.mark.parametrize(
    ("endpoint", "says", "never"),
    [
        ("ipc:///run/x/clients.sock", "`conductor up`", "systemctl"),
        ("tcp://gpu.example:5701", "on its host (`systemctl status", "conductor up"),
    ],
)
def test_who_reaches_nobody_is_sent_to_the_right_host(endpoint: str, says: str, never: str) -> None:
    message = Session(endpoint, "test", Timing()).no_broker().info.message
    assert endpoint in message
    assert says in message
    assert never not in message


def test_nobody_answers_within_the_deadline() -> None:
    it = Driver(Timing(connect_ms=700))
    it.do(it.core.call(wire.List(rid=RID), 10_000, it.now_ns))
    assert it.wait(699) == []
    effects = it.wait(1)
    failed = only(effects, Failed)
    assert failed.rid == RID
    assert isinstance(failed.error, Unavailable)
    assert failed.error.reason == "no_broker"
    assert "conductor up" in failed.error.info.message
    assert failed.error.retryable
    assert only(effects, Down).error.reason == "no_broker"
    assert it.core.phase is Phase.DOWN
    assert it.wait(20_000) == []


def test_a_call_with_less_patience_fails_alone() -> None:
    it = Driver(Timing(connect_ms=700))
    it.do(it.core.call(wire.List(rid=RID), 100, it.now_ns))
    assert only(it.wait(100), Failed).error.reason == "no_broker"
    assert it.core.phase is Phase.DIALLING


def test_the_next_request_dials_again() -> None:
    it = Driver(Timing(connect_ms=700))
    it.do(it.core.dial(it.now_ns))
    it.wait(700)
    it.sent()
    assert it.core.call(wire.List(rid=RID), 100, it.now_ns) == [Connect()]
    assert it.sent() == [it.hello()]
    it.welcome()
    assert it.sent() == [wire.List(rid=RID)]


def test_requests_made_while_dialling_wait_for_welcome() -> None:
    it = Driver()
    it.decode()
    it.core.call(wire.Status(rid=b"s" * 16), 1_000, it.now_ns)
    assert it.sent() == [it.hello()]
    it.welcome()
    assert {type(message) for message in it.sent()} == {wire.Status, wire.Decode}


def test_a_connection_that_breaks_before_welcome_is_dialled_again_after_a_pause() -> None:
    it = Driver()
    it.do(it.core.dial(it.now_ns))
    it.sent()
    assert it.core.lost(it.now_ns) == []
    assert it.wait(99) == []
    assert it.wait(1) == [Connect()]
    assert it.sent() == [it.hello()]


@pytest.mark.parametrize("how", ["welcome", "frames", "error"])
def test_another_major_version_is_a_typed_error(how: str) -> None:
    it = Driver()
    it.do(it.core.call(wire.List(rid=RID), 1_000, it.now_ns))
    if how == "welcome":
        effects = it.get(
            wire.Welcome(v=(2, 0), session="", broker_epoch=1, principal="", heartbeat_ms=1)
        )
    elif how == "frames":
        effects = it.core.bad(Unimplemented("unsupported_version", "2"), it.now_ns)
    else:
        effects = it.get(error(Code.UNIMPLEMENTED, "unsupported_version", rid=b""))
    assert only(effects, Failed).error.reason == "unsupported_version"
    assert it.core.phase is Phase.DOWN


def test_a_refused_session_fails_what_waits() -> None:
    it = Driver()
    it.decode()
    effects = it.get(error(Code.RESOURCE_EXHAUSTED, "too_many_sessions", rid=b""))
    assert only(effects, Failed).error.reason == "too_many_sessions"


def test_bad_frames_and_odd_messages_change_nothing() -> None:
    it = Driver()
    it.open()
    it.decode()
    assert isinstance(it.core.bad(InvalidArgument("bad_message", "x"), it.now_ns)[0], Warn)
    assert isinstance(it.get(wire.Ok(rid=RID))[0], Warn)
    assert isinstance(it.get(error(Code.INTERNAL, "odd", rid=b""))[0], Warn)
    assert it.welcome() == []
    unknown = b"u" * 16
    late: list[wire.BrokerMessage] = [
        wire.Tokens(rid=unknown, seq=0, text="?"),
        wire.Done(rid=unknown, seq=0, usage=Usage()),
        wire.Ok(rid=unknown),
        error(Code.INTERNAL, "late", rid=unknown),
        wire.Progress(rid=unknown, stage="load"),
        wire.Accepted(rid=unknown, job=1, position=0),
        wire.Pong(n=77),
        wire.Pong(n=-1),
        wire.Pong(n=1 << 200),
    ]
    assert it.get(*late) == []
    assert text(it.get(*tokens(0), done(1))) == "<0>"


# --- heartbeat --------------------------------------------------------------------------------


def test_an_idle_client_pings_and_pongs_keep_it_alive() -> None:
    it = Driver()
    it.open(heartbeat_ms=100)
    for _ in range(50):
        it.wait(50)
        for message in it.sent():
            assert message == wire.Ping(n=0)
            it.get(wire.Pong(n=0))
    assert it.core.phase is Phase.OPEN


def test_a_silent_broker_is_dialled_again() -> None:
    it = Driver()
    it.open(heartbeat_ms=100)
    effects = it.wait(350)
    assert only(effects, Connect)
    assert it.core.phase is Phase.DIALLING


def test_no_session_means_hello_again() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.List(rid=RID), 1_000, it.now_ns)
    it.sent()
    assert it.get(error(Code.FAILED_PRECONDITION, "no_session")) == [Connect()]
    assert it.sent() == [it.hello()]
    it.welcome()
    assert it.sent() == [wire.List(rid=RID)]


# --- calls ------------------------------------------------------------------------------------


def test_a_call_and_its_answer() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.List(rid=RID), 1_000, it.now_ns)
    assert it.sent() == [wire.List(rid=RID)]
    assert it.get(wire.Ok(rid=RID, body={"agents": []})) == [Answered(RID, {"agents": []})]
    assert it.get(wire.Ok(rid=RID)) == []


def test_a_late_answer_is_a_deadline_error() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.List(rid=RID), 1_000, it.now_ns)
    failed = only(it.wait(1_000), Failed).error
    assert isinstance(failed, DeadlineExceeded)
    assert failed.details["waited_ms"] == 1_000
    assert "LIST" in failed.info.message


def test_news_renew_the_deadline() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.Register(rid=RID, agent="a", model="m"), 1_000, it.now_ns)
    for done_bytes in range(5):
        assert it.wait(900) == []
        news = only(it.get(wire.Progress(rid=RID, stage="load", done=done_bytes, total=9)), News)
        assert news.done == done_bytes
    assert it.get(wire.Ok(rid=RID)) == [Answered(RID, {})]


def test_calls_are_sent_again_after_a_loss_and_after_a_restart() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.List(rid=RID), 1_000, it.now_ns)
    it.sent()
    for epoch in (1, 2):
        it.reconnect(epoch)
        assert it.sent() == [wire.List(rid=RID)]
    assert it.get(wire.Ok(rid=RID)) == [Answered(RID, {})]


def test_unregister_sent_twice_may_find_nothing_the_second_time() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.Unregister(rid=RID, agent="a"), 1_000, it.now_ns)
    it.reconnect()
    assert it.get(error(Code.NOT_FOUND, "no_such_agent")) == [Answered(RID, {})]


def test_unregister_sent_once_reports_not_found() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.Unregister(rid=RID, agent="a"), 1_000, it.now_ns)
    assert only(it.get(error(Code.NOT_FOUND, "no_such_agent")), Failed)


def test_ephemeral_agents_move_into_the_new_session_before_the_jobs() -> None:
    it = Driver()
    it.open()
    register = wire.Register(rid=b"r" * 16, agent="a", model="m", ephemeral=True)
    it.core.call(register, 1_000, it.now_ns)
    it.get(wire.Ok(rid=register.rid))
    it.decode()
    it.sent()
    it.reconnect()
    assert [type(message) for message in it.sent()] == [wire.Register, wire.Decode]
    assert isinstance(it.get(error(Code.NOT_FOUND, "no_such_model", register.rid))[0], Warn)
    it.reconnect()
    assert [type(message) for message in it.sent()] == [wire.Decode]


def test_an_unregistered_ephemeral_agent_is_not_brought_back() -> None:
    it = Driver()
    it.open()
    register = wire.Register(rid=b"r" * 16, agent="a", model="m", ephemeral=True)
    it.core.call(register, 1_000, it.now_ns)
    it.get(wire.Ok(rid=register.rid))
    it.core.call(wire.Unregister(rid=RID, agent="a"), 1_000, it.now_ns)
    it.get(wire.Ok(rid=RID))
    it.sent()
    it.reconnect()
    assert it.sent() == []


# --- jobs -------------------------------------------------------------------------------------


def test_a_reply_in_order() -> None:
    it = Driver()
    it.open()
    it.decode()
    effects = it.get(wire.Accepted(rid=RID, job=4, position=2, est_ms=9), *tokens(0, 1), done(2))
    assert effects[0] == Queued(RID, 4, 2, 9)
    assert text(effects) == "<0><1>"
    assert effects[-1] == Finished(RID, Usage(generated_tokens=2))
    assert it.get(*tokens(0, 1), done(2)) == []


def test_duplicates_and_another_order_change_nothing() -> None:
    it = Driver()
    it.open()
    it.decode()
    effects = it.get(*tokens(1, 1, 3), done(4), *tokens(0, 0, 2, 1), done(4))
    assert text(effects) == "<0><1><2><3>"
    assert isinstance(effects[-1], Finished)


def test_a_gap_is_asked_for_once() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.sent()
    it.get(*tokens(0, 2, 3))
    assert it.sent() == [wire.Resume(rid=RID, from_seq=1)]
    it.get(*tokens(4))
    assert it.sent() == []
    assert text(it.effects) == "<0>"


def test_a_confirmed_job_goes_on_by_resume() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.get(wire.Accepted(rid=RID, job=1, position=0), *tokens(0, 1))
    it.sent()
    it.reconnect()
    assert it.sent() == [wire.Resume(rid=RID, from_seq=2)]
    it.get(*tokens(2), done(3))
    assert text(it.effects) == "<0><1><2>"


def test_an_unconfirmed_job_is_sent_again_to_the_same_broker() -> None:
    it = Driver()
    it.open()
    it.decode()
    sent = it.sent()
    it.reconnect()
    assert it.sent() == sent


def test_an_unconfirmed_job_is_not_sent_to_a_restarted_broker() -> None:
    it = Driver()
    it.open()
    it.decode()
    failed = only(it.reconnect(epoch=2), Failed)
    assert failed.error.reason == "broker_restarted"
    assert it.sent() == []


def test_a_restarted_broker_ends_a_running_job_with_the_numbers() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.get(*tokens(0, 1))
    failed = only(it.reconnect(epoch=2), Failed).error
    assert isinstance(failed, Unavailable)
    assert failed.retryable
    assert failed.details == {"received_pieces": 2, "received_chars": 6}
    assert text(it.effects) == "<0><1>"


def test_a_job_that_was_never_sent_survives_everything() -> None:
    it = Driver()
    it.open()
    it.do(it.core.lost(it.now_ns))
    it.decode()
    it.sent()
    it.welcome(epoch=2)
    assert [type(message) for message in it.sent()] == [wire.Decode]


def test_nobody_comes_back_after_a_loss() -> None:
    it = Driver(Timing(reconnect_ms=3_000))
    it.open()
    it.decode()
    it.get(*tokens(0))
    it.core.lost(it.now_ns)
    assert it.wait(2_999) == []
    failed = only(it.wait(1), Failed).error
    assert failed.reason == "connection_lost"
    assert failed.retryable
    assert failed.details["received_pieces"] == 1


def test_a_broker_that_accepts_nothing_runs_into_the_deadline() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.sent()
    failed = only(it.wait(1_000), Failed).error
    assert failed.reason == "no_answer"
    assert it.sent() == [wire.Cancel(rid=RID)]


def test_the_brokers_deadline_is_enforced_here_too_with_some_grace() -> None:
    it = Driver(Timing(grace_ms=500))
    it.open()
    it.decode(timeout_ms=2_000)
    it.get(wire.Accepted(rid=RID, job=1, position=0))
    assert it.wait(2_499) == []
    failed = only(it.wait(1), Failed).error
    assert isinstance(failed, DeadlineExceeded)
    assert failed.reason == "timeout"
    assert it.sent()[-1] == wire.Cancel(rid=RID)


def test_a_quiet_job_is_asked_for_what_was_lost() -> None:
    it = Driver(Timing(quiet_ms=5_000))
    it.open()
    it.decode()
    it.get(*tokens(0))
    it.sent()
    assert it.wait(4_999) == []
    assert it.sent() == []
    it.wait(1)
    assert it.sent() == [wire.Resume(rid=RID, from_seq=1)]
    assert isinstance(it.get(done(1))[-1], Finished)


def test_an_error_after_output_comes_after_the_output() -> None:
    it = Driver()
    it.open()
    it.decode()
    lost = ErrorInfo(Code.UNAVAILABLE, "worker_lost", "gone", retryable=True)
    effects = it.get(wire.Error(rid=RID, error=lost, seq=2), *tokens(0, 1))
    assert text(effects) == "<0><1>"
    failed = effects[-1]
    assert isinstance(failed, Failed)
    assert failed.error.info == lost


# --- credit -----------------------------------------------------------------------------------


def test_credit_follows_the_reader() -> None:
    it = Driver()
    it.open()
    it.decode(window=4)
    it.sent()
    assert it.get(*tokens(0, 1, 2, 3)) == []
    assert it.sent() == []
    assert text(it.do(it.core.want(RID, 1, it.now_ns))) == "<0>"
    assert it.sent() == []
    assert text(it.do(it.core.want(RID, 1, it.now_ns))) == "<1>"
    assert it.sent() == [wire.Credit(rid=RID, ack=4, upto=6)]
    assert it.get(*tokens(4, 5)) == []
    effects = it.do(it.core.want(RID, None, it.now_ns))
    assert text(effects) == "<2><3><4><5>"
    it.get(done(6))
    assert isinstance(it.effects[-1], Finished)


def test_resume_with_a_window_gives_absolute_credit() -> None:
    it = Driver()
    it.open()
    it.decode(window=4)
    it.get(*tokens(0, 1))
    it.core.want(RID, 1, it.now_ns)
    it.sent()
    it.reconnect()
    assert it.sent() == [wire.Resume(rid=RID, from_seq=2, window=5)]


def test_cancelling_gives_credit_so_that_the_end_can_come() -> None:
    it = Driver()
    it.open()
    it.decode(window=1)
    it.get(*tokens(0))
    it.sent()
    it.core.cancel(RID, it.now_ns)
    assert it.sent() == [wire.Cancel(rid=RID), wire.Credit(rid=RID, ack=1, upto=2)]


# --- cancelling, closing, draining ------------------------------------------------------------


def test_cancel_before_the_job_was_sent() -> None:
    it = Driver()
    it.decode()
    finished = only(it.core.cancel(RID, it.now_ns), Finished)
    assert finished.usage.stop_reason == "cancelled"
    it.sent()
    it.welcome()
    assert it.sent() == []


@pytest.mark.parametrize("answer", ["done", "error"])
def test_cancel_ends_well_with_what_there_was(answer: str) -> None:
    it = Driver()
    it.open()
    it.decode()
    it.get(*tokens(0))
    it.sent()
    it.core.cancel(RID, it.now_ns)
    it.core.cancel(RID, it.now_ns)
    assert it.sent() == [wire.Cancel(rid=RID)]
    usage = Usage(generated_tokens=1, stop_reason="cancelled")
    if answer == "done":
        effects = it.get(wire.Done(rid=RID, seq=1, usage=usage))
    else:
        effects = it.get(
            wire.Error(rid=RID, error=error(Code.CANCELLED, "x").error, seq=1, usage=usage)
        )
    assert effects == [Finished(RID, usage)]


def test_cancelled_by_somebody_else_is_an_error() -> None:
    it = Driver()
    it.open()
    it.decode()
    assert only(it.get(error(Code.CANCELLED, "agent_gone")), Failed)


def test_an_unanswered_cancel_ends_here() -> None:
    it = Driver(Timing(cancel_ms=500))
    it.open()
    it.decode()
    it.get(*tokens(0))
    it.core.cancel(RID, it.now_ns)
    assert it.wait(499) == []
    assert only(it.wait(1), Finished).usage.stop_reason == "cancelled"


def test_a_cancel_is_repeated_after_a_loss() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.get(*tokens(0))
    it.core.lost(it.now_ns)
    it.core.cancel(RID, it.now_ns)
    it.sent()
    it.welcome()
    assert it.sent() == [wire.Resume(rid=RID, from_seq=1), wire.Cancel(rid=RID)]


def test_a_cancelled_job_and_a_restarted_broker_end_well() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.core.cancel(RID, it.now_ns)
    assert only(it.reconnect(epoch=2), Finished).usage.stop_reason == "cancelled"


def test_a_draining_broker_gets_nothing_new_and_the_next_one_all_of_it() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.sent()
    it.get(wire.GoAway(reason="shutdown", drain_ms=4_000))
    late = wire.Decode(rid=b"2" * 16, agent="a", prompt="x")
    more = wire.Register(rid=b"4" * 16, agent="b", model="m")
    assert it.core.decode(late, 1_000, it.now_ns) == []
    assert it.core.call(more, 60_000, it.now_ns) == []
    it.core.call(wire.Status(rid=b"3" * 16), 1_000, it.now_ns)
    assert it.sent() == [wire.Status(rid=b"3" * 16)]
    it.get(wire.Ok(rid=b"3" * 16))
    assert isinstance(it.get(*tokens(0), done(1))[-1], Finished), "what runs is finished"
    it.reconnect(epoch=2)
    assert it.sent() == [more, late]
    assert only(it.get(wire.Ok(rid=more.rid)), Answered)


def draining(rid: bytes = RID, usage: Usage | None = None, seq: int = 0) -> wire.Error:
    info = ErrorInfo(Code.UNAVAILABLE, "draining", "the broker leaves", True, 2_000)
    return wire.Error(rid=rid, error=info, seq=seq, usage=usage)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_job_that_a_leaving_broker_did_not_begin_is_the_next_ones(accepted: bool) -> None:
    it = Driver()
    it.open()
    it.decode(timeout_ms=60_000)
    (asked,) = it.sent()
    if accepted:
        it.get(wire.Accepted(rid=RID, job=1, position=0))
    assert it.get(draining(), wire.GoAway(reason="shutdown", drain_ms=4_000)) == []
    assert it.wait(900) == []
    it.sent()
    it.reconnect(epoch=2)
    assert it.sent() == [asked]
    it.get(wire.Accepted(rid=RID, job=1, position=0), *tokens(0))
    assert isinstance(it.get(done(1))[-1], Finished)


@pytest.mark.parametrize("why", ["begun", "unheard", "impatient", "unwanted"])
def test_a_job_that_was_begun_or_may_not_wait_ends_with_the_broker(why: str) -> None:
    it = Driver()
    it.open()
    it.decode(queue_ms=5_000 if why == "impatient" else None)
    usage, seq = None, 0
    if why == "begun":
        it.get(*tokens(0))
        usage, seq = Usage(generated_tokens=1), 1
    elif why == "unheard":
        usage = Usage(generated_tokens=1)
    elif why == "unwanted":
        it.core.cancel(RID, it.now_ns)
    failed = only(it.get(draining(usage=usage, seq=seq)), Failed)
    assert failed.error.reason == "draining"
    it.sent()
    it.reconnect(epoch=2)
    assert it.sent() == []


def test_a_registration_that_a_leaving_broker_did_not_make_is_the_next_ones() -> None:
    it = Driver()
    it.open()
    more = wire.Register(rid=b"4" * 16, agent="b", model="m")
    it.core.call(more, 60_000, it.now_ns)
    assert it.sent() == [more]
    assert it.get(draining(more.rid)) == []
    it.reconnect(epoch=2)
    assert it.sent() == [more]
    assert only(it.get(wire.Ok(rid=more.rid)), Answered)


def test_a_broker_that_says_that_it_leaves_and_stays_is_not_waited_for() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.get(draining(), wire.GoAway(reason="shutdown", drain_ms=4_000))
    it.core.decode(wire.Decode(rid=b"2" * 16, agent="a", prompt="x"), 1_000, it.now_ns)
    assert it.wait(999) == []
    ends = [effect for effect in it.wait(1) if isinstance(effect, Failed)]
    assert {effect.error.reason for effect in ends} == {"no_answer"}
    assert len(ends) == 2


def test_no_next_broker_is_said_to_whoever_waits_for_it() -> None:
    it = Driver(Timing(reconnect_ms=3_000))
    it.open()
    it.decode()
    it.get(draining())
    it.core.lost(it.now_ns)
    assert only(it.wait(3_000), Failed).error.reason == "no_broker"


def test_close_says_bye_and_fails_what_runs() -> None:
    it = Driver()
    it.open()
    it.decode()
    it.core.call(wire.List(rid=b"l" * 16), 1_000, it.now_ns)
    it.get(*tokens(0))
    failed = [effect for effect in it.core.close() if isinstance(effect, Failed)]
    assert {effect.rid for effect in failed} == {RID, b"l" * 16}
    assert {effect.error.reason for effect in failed} == {"closed"}
    assert it.sent() == [wire.Bye()]
    refused = only(it.core.call(wire.List(rid=RID), 1_000, it.now_ns), Failed)
    assert refused.error.reason == "closed"
    assert it.core.next_ns() is None


def test_forgetting_a_call_leaves_nothing_behind() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.List(rid=RID), 1_000, it.now_ns)
    it.core.forget(RID, it.now_ns)
    assert it.sent() == [wire.List(rid=RID)]
    assert it.wait(2_000) == []
    assert it.get(wire.Ok(rid=RID)) == []


def test_errors_are_conductor_errors() -> None:
    it = Driver(Timing(connect_ms=1))
    it.decode()
    assert isinstance(only(it.wait(1), Failed).error, ConductorError)


@pytest.mark.parametrize("how", ["forgotten", "late"])
def test_a_load_that_nobody_waits_for_is_given_up(how: str) -> None:
    it = Driver()
    it.open()
    it.core.call(wire.Register(rid=RID, agent="a", model="m"), 1_000, it.now_ns)
    it.sent()
    if how == "forgotten":
        it.core.forget(RID, it.now_ns)
    else:
        assert only(it.wait(1_000), Failed).error.reason == "no_answer"
    assert it.sent() == [wire.Cancel(rid=RID)]
    it.core.forget(RID, it.now_ns)
    assert it.sent() == []


@pytest.mark.parametrize(
    ("said", "older"),
    [
        ("undecodable message: Invalid value 'FIT' - at `$.t`", True),
        ("undecodable message: Object missing required field `model`", False),
    ],
)
def test_a_message_that_an_older_broker_does_not_know(said: str, older: bool) -> None:
    it = Driver()
    it.open()
    it.do(it.core.call(Fit(rid=RID, model="m"), 10_000, it.now_ns))
    info = ErrorInfo(Code.INVALID_ARGUMENT, "bad_message", said)
    failed = only(it.get(wire.Error(rid=RID, error=info)), Failed).error
    assert failed.reason == "bad_message"
    assert said in failed.info.message
    assert ("upgrade the broker" in failed.info.message) == older


def test_an_answered_register_is_not_cancelled() -> None:
    it = Driver()
    it.open()
    it.core.call(wire.Register(rid=RID, agent="a", model="m"), 1_000, it.now_ns)
    it.get(wire.Ok(rid=RID))
    it.sent()
    it.core.forget(RID, it.now_ns)
    assert it.sent() == []


# --- features -----------------------------------------------------------------------------------


def test_a_broker_that_would_ignore_a_grammar_is_not_asked() -> None:
    driver = Driver()
    driver.open()
    [failed] = driver.decode(grammar="root ::= .")
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Unimplemented)
    assert failed.error.reason == "no_structured_output"
    assert driver.sent() == []
    # Nor one that a waiting job gets to see first.
    driver = Driver()
    driver.decode(json_schema={"type": "null"})
    driver.sent()
    effects = driver.welcome()
    assert [type(effect) for effect in effects] == [Opened, Failed]
    assert driver.sent() == []


def test_a_broker_that_follows_grammars_is_asked() -> None:
    driver = Driver()
    driver.decode(json_schema={"type": "null"})
    driver.sent()
    assert [type(effect) for effect in driver.welcome(features=["structured_output"])] == [Opened]
    [decode] = driver.sent()
    assert isinstance(decode, wire.Decode)
    assert decode.json_schema == {"type": "null"}
