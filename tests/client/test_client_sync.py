"""Conductor against a scripted broker: a real socket, real threads."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_broker import (
    PIECES,
    Peer,
    ScriptedBroker,
    begun,
    error_info,
    eventually,
    nothing,
)

from vram_conductor.client import (
    AlreadyExists,
    Cancelled,
    Conductor,
    DeadlineExceeded,
    ErrorInfo,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    LedgerDeny,
    News,
    NotFound,
    Unavailable,
    Usage,
)
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.values import Message, Sampling

TEXT = "".join(PIECES)


@pytest.fixture
def conductor(broker: ScriptedBroker) -> Iterator[Conductor]:
    with Conductor(broker.endpoint) as conductor:
        yield conductor


# --- connecting -------------------------------------------------------------------------------


def test_no_broker_is_a_typed_error_within_its_deadline(short_tmp: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        Conductor(f"ipc://{short_tmp}/none.ipc", connect_timeout_s=0.3)
    assert 0.3 <= time.monotonic() - began < 3.0
    assert caught.value.reason == "no_broker"
    assert caught.value.retryable
    assert "conductor up" in str(caught.value)


def test_a_broker_that_never_answers_hello_is_the_same(broker: ScriptedBroker) -> None:
    broker.mute = True
    with pytest.raises(Unavailable, match="no broker answers"):
        Conductor(broker.endpoint, connect_timeout_s=0.2)


def test_a_broker_that_starts_late_is_found(short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/late.ipc"
    brokers: list[ScriptedBroker] = []
    timer = threading.Timer(0.2, lambda: brokers.append(ScriptedBroker(endpoint)))
    timer.start()
    try:
        with Conductor(endpoint) as conductor:
            assert conductor.ping() > 0
    finally:
        timer.join()
        brokers[0].close()


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("nonsense", "bad_endpoint"),
        ("tcp://127.0.0.1:99999", "bad_endpoint"),
        ("ipc:///" + "x" * 200, "ipc_path_too_long"),
    ],
)
def test_a_bad_endpoint_is_refused_at_once(endpoint: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Conductor(endpoint)
    assert caught.value.reason == reason


def test_tcp(short_tmp: Path) -> None:
    with (
        ScriptedBroker("tcp://127.0.0.1:0") as broker,
        Conductor(broker.endpoint) as conductor,
    ):
        assert conductor.agent("a").chat("x").result().text == TEXT


def test_the_endpoint_comes_from_the_environment(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", broker.endpoint)
    with Conductor() as conductor:
        assert conductor.endpoint == broker.endpoint
        assert conductor.broker_epoch == 1
        assert conductor.limits == {"n_ctx_max": 4096}


def test_the_endpoint_comes_from_the_configuration_file(
    broker: ScriptedBroker, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short_tmp / "conductor.toml"
    config.write_text(f'[broker]\nclients = "{broker.endpoint}"\n')
    monkeypatch.delenv("VRAM_CONDUCTOR_CLIENTS", raising=False)
    monkeypatch.setenv("VRAM_CONDUCTOR_CONFIG", str(config))
    with Conductor() as conductor:
        assert conductor.endpoint == broker.endpoint


# --- requests ---------------------------------------------------------------------------------


def test_register_list_status_reset_unregister(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    agent = conductor.register(
        "coder", "m", n_ctx=512, kv_type="q8_0", slots=2, ttl_s=60, temperature=0, seed=7
    )
    _, message = broker.expect(wire.Register)
    assert (message.n_ctx, message.kv_type, message.slots, message.ttl_s) == (512, "q8_0", 2, 60)
    assert message.sampling == Sampling(temperature=0.0, seed=7)
    assert agent.info is not None
    assert agent.info.n_ctx == 512
    assert [known.agent for known in conductor.list()] == ["coder"]
    assert conductor.status().version == "scripted"
    assert agent.reset("side") == 1
    assert broker.expect(wire.Reset)[1].conversation == "side"
    agent.unregister()
    assert conductor.list() == []
    with pytest.raises(NotFound):
        conductor.unregister("coder")


def test_an_error_of_the_broker_keeps_its_type_and_numbers(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.on[wire.Register] = lambda peer, message: peer.fail(
        message.rid, error_info(Code.ALREADY_EXISTS, "agent_exists", n_ctx=512)
    )
    with pytest.raises(AlreadyExists) as caught:
        conductor.register("coder", "m")
    assert caught.value.reason == "agent_exists"
    assert caught.value.details == {"n_ctx": 512}


def test_a_refusal_is_one_line_and_knows_what_fits(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    line = "VRAM_LEDGER_DENY code=CAP requested=136MiB largest_n_ctx=2304"
    info = ErrorInfo(
        Code.RESOURCE_EXHAUSTED,
        "VRAM_LEDGER_DENY",
        line,
        retryable=True,
        details={"largest_n_ctx_that_fits": 2304, "requested_bytes": 142606336},
    )
    broker.on[wire.Register] = lambda peer, message: peer.fail(message.rid, info)
    with pytest.raises(LedgerDeny) as caught:
        conductor.register("analyst", "m", n_ctx=8192)
    assert str(caught.value) == line
    assert caught.value.largest_n_ctx == 2304
    assert caught.value.details["requested_bytes"] == 142606336
    assert caught.value.retryable


def test_progress_reaches_the_caller(broker: ScriptedBroker, conductor: Conductor) -> None:
    def slowly(peer: Peer, message: wire.Register) -> None:
        for done in (1, 2):
            peer.send(wire.Progress(rid=message.rid, stage="load", done=done, total=2))
        peer.send(wire.Ok(rid=message.rid))

    broker.on[wire.Register] = slowly
    news: list[News] = []
    agent = conductor.register("coder", "m", on_progress=news.append)
    assert [(item.stage, item.done, item.total) for item in news] == [
        ("load", 1, 2),
        ("load", 2, 2),
    ]
    assert agent.info is None


def test_no_answer_is_a_deadline_error(broker: ScriptedBroker) -> None:
    broker.on[wire.List] = nothing
    with Conductor(broker.endpoint, timeout_s=0.1) as conductor:
        with pytest.raises(DeadlineExceeded, match="LIST"):
            conductor.list()
        assert conductor.ping() > 0


def test_an_answer_of_another_shape_is_a_typed_error(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.on[wire.List] = lambda peer, message: peer.send(
        wire.Ok(rid=message.rid, body={"agents": 7})
    )
    with pytest.raises(Internal) as caught:
        conductor.list()
    assert caught.value.reason == "bad_answer"


# --- replies ----------------------------------------------------------------------------------


def test_pieces_and_result(conductor: Conductor) -> None:
    reply = conductor.agent("a").chat("x")
    assert list(reply) == list(PIECES)
    result = reply.result()
    assert result.text == reply.text == TEXT
    assert result.ids == reply.ids == [0, 1, 2]
    assert result.usage == reply.usage == Usage(generated_tokens=3)
    assert reply.queued is not None
    assert reply.queued.job == 1
    assert next(reply, None) is None


def test_result_after_some_pieces_has_all_of_it(conductor: Conductor) -> None:
    reply = conductor.agent("a").chat("x")
    assert next(reply) == PIECES[0]
    assert reply.result().text == TEXT


def test_what_chat_and_decode_send(broker: ScriptedBroker, conductor: Conductor) -> None:
    agent = conductor.agent("a")
    agent.chat("hi", system="be brief", max_tokens=3, stop="\n").result()
    _, message = broker.expect(wire.Decode)
    assert message.messages == [Message("system", "be brief"), Message("user", "hi")]
    assert message.continue_
    assert (message.max_tokens, message.stop) == (3, ["\n"])
    agent.chat([{"role": "user", "content": "hi"}], conversation="c2").result()
    _, message = broker.expect(wire.Decode)
    assert message.messages == [Message("user", "hi")]
    assert not message.continue_
    assert message.conversation == "c2"
    agent.decode(tokens=(1, 2), continue_=True, logit_bias={5: -1.5}, top_k=3).result()
    _, message = broker.expect(wire.Decode)
    assert message.tokens == [1, 2]
    assert message.continue_
    assert message.logit_bias == [(5, -1.5)]
    assert message.sampling == Sampling(top_k=3)


def test_an_error_after_some_text(broker: ScriptedBroker, conductor: Conductor) -> None:
    def broken(peer: Peer, message: wire.Decode) -> None:
        peer.send(wire.Tokens(rid=message.rid, seq=0, text="half"))
        peer.fail(message.rid, error_info(Code.UNAVAILABLE, "worker_lost", tokens=1), 1)

    broker.on[wire.Decode] = broken
    reply = conductor.agent("a").chat("x")
    assert next(reply) == "half"
    for _ in range(2):
        with pytest.raises(Unavailable, match="worker_lost"):
            next(reply)
    with pytest.raises(Unavailable):
        reply.result()
    assert reply.text == "half"


def test_result_with_a_timeout_leaves_the_job_alone(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x")
    with pytest.raises(DeadlineExceeded) as caught:
        reply.result(timeout_s=0.05)
    assert caught.value.reason == "not_finished"
    assert reply.text == TEXT
    assert broker.of(wire.Cancel) == []
    peer, _ = broker.expect(wire.Decode)
    peer.done(reply.rid, 3)
    assert reply.result().text == TEXT


def test_a_slow_reader_with_a_window_holds_the_broker_back(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.pieces = [f"{number} " for number in range(100)]
    window = 8
    reply = conductor.agent("a").chat("x", window=window)
    read = [next(reply) for _ in range(10)]
    broker.expect(wire.Decode)
    conductor.ping()
    released: list[int] = []
    broker.do(lambda: released.append(broker.streams[reply.rid].released))
    # Read, handed out ahead of the reader, and the window itself.
    assert 10 <= released[0] <= 10 + window // 4 + window
    read += list(reply)
    assert read == broker.pieces
    assert len(broker.of(wire.Credit)) >= 100 // window


def test_without_a_window_the_reader_holds_nothing_back(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.pieces = [f"{number} " for number in range(100)]
    reply = conductor.agent("a").chat("x")
    broker.expect(wire.Decode)
    conductor.ping()
    released: list[int] = []
    broker.do(lambda: released.append(broker.streams[reply.rid].released))
    assert released == [100]
    assert broker.of(wire.Credit) == []
    assert reply.result().text == "".join(broker.pieces)


# --- cancelling -------------------------------------------------------------------------------


def test_leaving_the_block_cancels(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    with conductor.agent("a").chat("x") as reply:
        assert next(reply) == PIECES[0]
    assert broker.expect(wire.Cancel)[1].rid == reply.rid
    assert reply.result().usage.stop_reason == "cancelled"


def test_leaving_the_block_at_the_end_cancels_nothing(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    with conductor.agent("a").chat("x") as reply:
        assert list(reply) == list(PIECES)
    conductor.ping()
    assert broker.of(wire.Cancel) == []


def test_an_exception_in_the_block_cancels_and_passes(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.on[wire.Decode] = begun
    with pytest.raises(ZeroDivisionError), conductor.agent("a").chat("x"):
        raise ZeroDivisionError
    broker.expect(wire.Cancel)


def test_cancel_keeps_what_came(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x")
    assert next(reply) == PIECES[0]
    reply.cancel()
    reply.cancel()
    assert reply.result().text == TEXT
    assert len(broker.of(wire.Cancel)) == 1
    reply.cancel()


def test_a_forgotten_reply_cancels(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    for piece in conductor.agent("a").chat("x"):
        assert piece == PIECES[0]
        break
    gc.collect()
    _, decode = broker.expect(wire.Decode)
    assert broker.expect(wire.Cancel)[1].rid == decode.rid


def test_a_detached_job_is_left_alone(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    with conductor.agent("a").chat("x", detach=True) as reply:
        assert next(reply) == PIECES[0]
    del reply
    gc.collect()
    conductor.ping()
    assert broker.of(wire.Cancel) == []


def test_another_thread_cancels_while_one_waits(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.on[wire.Decode] = begun
    broker.pieces = []
    reply = conductor.agent("a").chat("x")
    results: list[str] = []
    reader = threading.Thread(target=lambda: results.append(reply.result().usage.stop_reason))
    reader.start()
    broker.expect(wire.Decode)
    reply.cancel()
    reader.join(20)
    assert results == ["cancelled"]


def test_ctrl_c_while_waiting_harms_nothing(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    broker.on[wire.List] = nothing
    reply = conductor.agent("a").chat("x")
    assert [next(reply) for _ in PIECES] == list(PIECES)

    def interrupt() -> None:
        assert waiting.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    def wait_for(wait: Callable[[], object]) -> None:
        waiting.set()
        wait()

    for wait in (reply.result, conductor.list):
        waiting = threading.Event()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            wait_for(wait)
        thread.join()
    peer, _ = broker.expect(wire.Decode)
    peer.done(reply.rid, 3)
    assert reply.result().text == TEXT


# --- threads, closing, forking ----------------------------------------------------------------


def test_many_threads_share_one_conductor(broker: ScriptedBroker, conductor: Conductor) -> None:
    def echo(peer: Peer, message: wire.Decode) -> None:
        peer.reply(message.rid, [message.prompt or "", "!"])

    broker.on[wire.Decode] = echo
    failures: list[object] = []

    def work(name: int) -> None:
        agent = conductor.agent(f"a{name}")
        for turn in range(20):
            text = agent.decode(prompt=f"{name}-{turn}").result(20).text
            if text != f"{name}-{turn}!" or conductor.list() != []:
                failures.append(text)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


def test_threads_that_share_one_reply_get_each_piece_once(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.pieces = [f"{number} " for number in range(500)]
    reply = conductor.agent("a").chat("x")
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.extend(reply)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(got) == sorted(broker.pieces)
    assert reply.text == "".join(broker.pieces)


def test_hundreds_of_replies_at_once(broker: ScriptedBroker, conductor: Conductor) -> None:
    asked: list[tuple[Peer, wire.Decode]] = []
    broker.on[wire.Decode] = lambda peer, message: asked.append((peer, message))
    replies = [conductor.agent("a").decode(prompt=str(number)) for number in range(400)]
    eventually(lambda: len(asked) == 400, "all were sent")
    # All at the same time, piece by piece, and in another order than they were asked.
    for seq in range(5):
        for peer, message in reversed(asked):
            peer.send(wire.Tokens(rid=message.rid, seq=seq, text=f"{message.prompt}.{seq} "))
    for peer, message in asked:
        peer.done(message.rid, 5)
    for number, reply in enumerate(replies):
        expected = "".join(f"{number}.{seq} " for seq in range(5))
        assert reply.result(20).text == expected


def test_close_while_streaming(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun
    conductor = Conductor(broker.endpoint)
    reply = conductor.agent("a").chat("x")
    assert next(reply) == PIECES[0]
    caught: list[BaseException] = []

    def read_on() -> None:
        try:
            reply.result()
        except Cancelled as error:
            caught.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    conductor.close()
    conductor.close()
    reader.join(20)
    assert len(caught) == 1
    with pytest.raises(Cancelled, match="closed"):
        next(reply)
    with pytest.raises(Cancelled, match="closed"):
        conductor.ping()
    with pytest.raises(Cancelled, match="closed"):
        conductor.agent("a").chat("x").result()
    broker.expect(wire.Bye)
    assert reply.text == TEXT


def test_a_forgotten_conductor_says_bye(broker: ScriptedBroker) -> None:
    conductor = Conductor(broker.endpoint)
    reply = conductor.agent("a").chat("x")
    del conductor
    gc.collect()
    # The reply keeps it open.
    assert reply.result().text == TEXT
    assert broker.of(wire.Bye) == []
    del reply
    gc.collect()
    broker.expect(wire.Bye)


def test_a_fork_is_told_and_harms_nothing(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[wire.Decode] = begun
    reply = conductor.agent("a").chat("x")
    assert next(reply) == PIECES[0]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        reasons: list[str] = []
        attempts: list[Any] = [
            conductor.ping,
            lambda: next(reply),
            reply.result,
            reply.cancel,
            lambda: conductor.agent("a").chat("x"),
        ]
        for attempt in attempts:
            try:
                attempt()
            except FailedPrecondition as error:
                reasons.append(error.reason)
        with reply:
            pass
        conductor.close()
        del reply, conductor
        gc.collect()
        os.write(write_end, ",".join(reasons).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        assert answer.read() == ",".join(["forked"] * 5)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert conductor.ping() > 0
    assert broker.of(wire.Cancel) == []
    assert broker.of(wire.Bye) == []
    assert next(reply) == PIECES[1]
