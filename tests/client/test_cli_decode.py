"""``conductor decode``: what it sends, streams and says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_broker import PIECES, Peer, ScriptedBroker, begun, nothing
from terminal import Terminal

from vram_conductor.client import cli
from vram_conductor.client.cli_decode import receipt
from vram_conductor.client.job_watch import hindrance
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.status import JobStatus, StatusReport
from vram_conductor.protocol.values import Message, Sampling, Swap, Usage

CONDUCTOR = [sys.executable, "-m", "vram_conductor.client.cli"]


def run(broker: ScriptedBroker, *arguments: str) -> int:
    return cli.main(["decode", *arguments, "--clients", broker.endpoint])


def sent(broker: ScriptedBroker) -> wire.Decode:
    return broker.of(wire.Decode)[-1]


# --- what is sent -----------------------------------------------------------------------------


def test_a_text_is_the_next_user_message(broker: ScriptedBroker) -> None:
    assert run(broker, "coder", "hello") == 0
    message = sent(broker)
    assert message.messages == [Message("user", "hello")]
    assert message.continue_
    assert (message.agent, message.conversation) == ("coder", "main")
    assert message.max_tokens is None
    assert message.sampling == Sampling()


@pytest.mark.parametrize(
    ("flags", "messages", "prompt", "continues"),
    [
        (["--system", "Be brief"], [("system", "Be brief"), ("user", "x")], None, True),
        (["--new"], [("user", "x")], None, False),
        (["--new", "--system", "s"], [("system", "s"), ("user", "x")], None, False),
        (["--raw"], None, "x", True),
        (["--raw", "--new"], None, "x", False),
    ],
)
def test_ways_to_say_it(
    broker: ScriptedBroker,
    flags: list[str],
    messages: list[tuple[str, str]] | None,
    prompt: str | None,
    continues: bool,
) -> None:
    assert run(broker, "coder", *flags, "x") == 0
    message = sent(broker)
    expected = None if messages is None else [Message(*pair) for pair in messages]
    assert (message.messages, message.prompt) == (expected, prompt)
    assert message.continue_ is continues


@pytest.mark.parametrize("flags", [[], ["--raw"], ["--new"]])
def test_nothing_to_say_is_refused_before_anybody_is_asked(
    broker: ScriptedBroker, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run(broker, "coder", "", *flags) == 8
    assert capsys.readouterr().err == (
        "conductor: TEXT is empty: there is nothing to say (empty_input)\n"
    )
    assert not broker.of(wire.Decode)


def test_all_flags(broker: ScriptedBroker) -> None:
    flags = [
        "--conversation",
        "plan",
        "--max-tokens",
        "5",
        "--stop",
        "a",
        "--stop",
        "b",
        "--queue-ms",
        "1000",
        "--timeout-ms",
        "2000",
        "--priority",
        "7",
        "--expect-version",
        "0",
        "--temperature",
        "0.5",
        "--seed",
        "3",
    ]
    assert run(broker, "coder", *flags, "x") == 0
    message = sent(broker)
    assert message.conversation == "plan"
    assert message.stop == ["a", "b"]
    assert (message.max_tokens, message.queue_ms, message.timeout_ms) == (5, 1000, 2000)
    assert (message.priority, message.expect_version) == (7, 0)
    assert message.sampling == Sampling(temperature=0.5, seed=3)


def test_flags_that_exclude_each_other(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "coder", "--raw", "--system", "s", "x") == 8
    assert "(bad_flags)" in capsys.readouterr().err
    assert not broker.of(wire.Decode)


def piped(broker: ScriptedBroker, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*CONDUCTOR, "decode", "coder", "-", "--clients", broker.endpoint],
        input=data,
        capture_output=True,
        timeout=60,
    )


def test_stdin(broker: ScriptedBroker) -> None:
    done = piped(broker, "a long text ü\nwith lines\n".encode())
    assert done.returncode == 0
    assert done.stdout.decode() == "one, two, three.\n"
    assert sent(broker).messages == [Message("user", "a long text ü\nwith lines\n")]


def test_stdin_that_is_no_utf8(broker: ScriptedBroker) -> None:
    done = piped(broker, b"ab\xff")
    assert done.returncode == 8
    assert b"not UTF-8 (byte 2)" in done.stderr
    assert not broker.of(wire.Decode)


def test_a_text_that_is_no_utf8(broker: ScriptedBroker) -> None:
    done = subprocess.run(
        [*CONDUCTOR, "decode", "coder", b"ab\xff", "--clients", broker.endpoint],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 8
    assert b"Traceback" not in done.stderr


# --- what comes back --------------------------------------------------------------------------


def test_the_text_is_on_stdout_alone(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "coder", "x", "--receipt") == 0
    out, err = capsys.readouterr()
    assert out == "one, two, three.\n"
    assert err.startswith("[prompt 0 (0 re-used); generated")


@pytest.mark.parametrize(
    ("pieces", "out"), [(("a\n",), "a\n"), ((), ""), (("a", "\n\n"), "a\n\n"), (("a",), "a\n")]
)
def test_it_ends_with_one_line_break_at_least(
    broker: ScriptedBroker, pieces: tuple[str, ...], out: str, capsys: Any
) -> None:
    broker.pieces = pieces
    assert run(broker, "coder", "x") == 0
    assert capsys.readouterr().out == out


def test_a_grammar_and_a_schema_come_from_files(
    broker: ScriptedBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grammar, schema = tmp_path / "a.gbnf", tmp_path / "a.json"
    grammar.write_text('root ::= "é"\n', "utf-8")
    schema.write_text('{"type": "null"}')
    assert run(broker, "coder", "x", "--grammar", str(grammar)) == 0
    assert (sent(broker).grammar, sent(broker).json_schema) == ('root ::= "é"\n', None)
    assert run(broker, "coder", "x", "--json-schema", str(schema)) == 0
    assert (sent(broker).grammar, sent(broker).json_schema) == (None, {"type": "null"})
    count = len(broker.of(wire.Decode))
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "deep").write_text("[" * 100_000)
    capsys.readouterr()
    for flags, reason in [
        (["--grammar", str(grammar), "--json-schema", str(schema)], "bad_flags"),
        (["--grammar", str(tmp_path / "nothing")], "bad_input"),
        (["--grammar", str(tmp_path / "latin")], "bad_input"),
        (["--json-schema", str(grammar)], "bad_input"),
        (["--json-schema", str(tmp_path / "list")], "bad_input"),
        (["--json-schema", str(tmp_path / "deep")], "bad_input"),
    ]:
        assert run(broker, "coder", "x", *flags) == 8
        assert f"({reason})" in capsys.readouterr().err
    assert len(broker.of(wire.Decode)) == count, "nobody was asked"


def test_json(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "coder", "x", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["text"] == "one, two, three."
    assert list(value) == ["text", "ids", "usage"]
    # Every field, whatever is left out on the wire.
    assert list(value["usage"]) == list(Usage.__struct_fields__)
    assert value["usage"]["reused_tokens"] == 0
    assert value["usage"]["stop_reason"] == "eos"
    assert value["usage"]["swap"] == {"evicted": [], "restored": False, "bytes": 0, "ms": 0.0}


def test_an_error_in_the_middle_keeps_what_came(broker: ScriptedBroker, capsys: Any) -> None:
    def broken(peer: Peer, message: wire.Decode) -> None:
        peer.send(wire.Accepted(rid=message.rid, job=1, position=0))
        peer.send(wire.Tokens(rid=message.rid, seq=0, text="half a"))
        peer.fail(
            message.rid, ErrorInfo(Code.UNAVAILABLE, "worker_lost", "lost", retryable=True), seq=1
        )

    broker.on[wire.Decode] = broken
    assert run(broker, "coder", "x") == 6
    out, err = capsys.readouterr()
    assert out == "half a"
    assert "lost (worker_lost)" in err


def test_an_error_in_the_middle_gets_a_line_of_its_own_on_a_terminal(
    broker: ScriptedBroker,
) -> None:
    def broken(peer: Peer, message: wire.Decode) -> None:
        peer.send(wire.Accepted(rid=message.rid, job=1, position=0))
        peer.send(wire.Tokens(rid=message.rid, seq=0, text="half a"))
        peer.fail(message.rid, ErrorInfo(Code.INTERNAL, "decode_failed", "bad"), seq=1)

    broker.on[wire.Decode] = broken
    with Terminal([*CONDUCTOR, "decode", "c", "x", "--clients", broker.endpoint]) as terminal:
        assert terminal.wait() == 1
    assert "half a\nconductor: bad (decode_failed)\n" in terminal.text


def test_control_characters_do_not_reach_a_terminal(broker: ScriptedBroker) -> None:
    broker.pieces = ("a\x1b[2J", "b\x07", "\x1b]0;title\x07c")
    with Terminal([*CONDUCTOR, "decode", "c", "x", "--clients", broker.endpoint]) as terminal:
        assert terminal.wait() == 0
    assert "a�[2Jb��]0;title�c" in terminal.raw
    done = subprocess.run(
        [*CONDUCTOR, "decode", "c", "x", "--clients", broker.endpoint],
        capture_output=True,
        timeout=60,
    )
    assert b"a\x1b[2Jb" in done.stdout, "a file gets what the model said"


# --- why it does not begin ----------------------------------------------------------------------

WAITS = JobStatus(
    job=7, principal="local", agent="coder", conversation="main", device="cpu", state="queued"
)


def behind(broker: ScriptedBroker, *waiting: tuple[str, int | None]) -> None:
    """A job that waits for one thing after the other, one per STATUS, and begins then."""
    asked: list[bytes] = []

    def decode(peer: Peer, message: wire.Decode) -> None:
        asked.append(message.rid)
        peer.send(wire.Accepted(rid=message.rid, job=WAITS.job, position=0))

    looks = list(waiting)

    def status(peer: Peer, message: wire.Status) -> None:
        what, left_ms = looks.pop(0) if looks else ("", None)
        mine = msgspec.structs.replace(WAITS, waiting=what, waiting_ms=left_ms)
        other = msgspec.structs.replace(WAITS, job=6, waiting="worker")
        report = StatusReport(broker_epoch=1, version="scripted", jobs=[other, mine])
        peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(report)))
        if not looks:
            peer.reply(asked[0])

    broker.on[wire.Decode], broker.on[wire.Status] = decode, status


def test_what_a_job_waits_for_is_told_once(broker: ScriptedBroker, capsys: Any) -> None:
    behind(broker, ("lease:local/train", 90_000), ("lease:local/train", 89_000), ("foreign", None))
    assert run(broker, "coder", "x") == 0
    out, err = capsys.readouterr()
    assert out == "one, two, three.\n"
    assert err.splitlines()[0] == "waiting for the lease local/train to end, 1 min 30 s at most"
    assert len(broker.of(wire.Status)) == 3
    assert err.count("local/train") == 1


def test_a_terminal_shows_it_as_long_as_it_lasts(broker: ScriptedBroker) -> None:
    behind(broker, ("worker", None), ("", None), ("", None))
    with Terminal([*CONDUCTOR, "decode", "c", "x", "--clients", broker.endpoint]) as terminal:
        terminal.expect("waiting for its device's worker to come back … ")
        terminal.expect("waiting for the first token … ")
        assert terminal.wait() == 0
    assert "one, two, three." in terminal.text


def test_an_answer_that_comes_at_once_asks_nobody(broker: ScriptedBroker) -> None:
    assert run(broker, "coder", "x") == 0
    assert not broker.of(wire.Status)


@pytest.mark.parametrize(
    ("waiting", "left_ms", "words"),
    [
        ("", None, ""),
        ("lease:others", 1000, "waiting for the lease others to end, 1.00 s at most"),
        ("foreign", None, "waiting for device memory that other programs use"),
        ("something new", None, "waiting for something new"),
    ],
)
def test_what_it_waits_for_in_words(waiting: str, left_ms: int | None, words: str) -> None:
    job = msgspec.structs.replace(WAITS, waiting=waiting, waiting_ms=left_ms)
    assert hindrance(job) == words


# --- Ctrl-C -----------------------------------------------------------------------------------


def ended(peer: Peer, message: wire.Cancel) -> None:
    peer.done(message.rid, len(PIECES), Usage(generated_tokens=3, stop_reason="cancelled"))


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun
    broker.on[wire.Cancel] = ended
    command = [*CONDUCTOR, "decode", "c", "x", "--receipt", "--clients", broker.endpoint]
    with Terminal(command) as terminal:
        terminal.expect("one, two, three.")
        terminal.press("\x03")
        assert terminal.wait() == 130
    assert len(broker.of(wire.Cancel)) == 1
    lines = terminal.text.splitlines()
    assert "cancelled; the conversation keeps what was said" in lines
    assert lines[-1].startswith("[prompt") or lines[-2].startswith("[prompt")
    assert "Traceback" not in terminal.text


def test_ctrl_c_before_the_first_token(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = lambda peer, message: peer.send(
        wire.Accepted(rid=message.rid, job=1, position=3)
    )
    with Terminal([*CONDUCTOR, "decode", "c", "x", "--clients", broker.endpoint]) as terminal:
        terminal.expect("waiting for the first token … ")
        terminal.press("\x03")
        assert terminal.wait() == 130
    assert "cancelled; the conversation is as it was" in terminal.text


def test_ctrl_c_twice_does_not_wait_for_the_broker(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun
    broker.on[wire.Cancel] = nothing
    with Terminal([*CONDUCTOR, "decode", "c", "x", "--clients", broker.endpoint]) as terminal:
        terminal.expect("one, two, three.")
        terminal.press("\x03")
        broker.expect(wire.Cancel)
        terminal.press("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.text


def test_ctrl_c_with_json_is_still_one_value(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun
    broker.on[wire.Cancel] = ended
    with subprocess.Popen(
        [*CONDUCTOR, "decode", "c", "x", "--json", "--clients", broker.endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as decoding:
        broker.expect(wire.Decode)
        decoding.send_signal(2)
        out, _ = decoding.communicate(timeout=30)
    assert decoding.returncode == 130
    assert json.loads(out)["usage"]["stop_reason"] == "cancelled"


# --- the receipt ------------------------------------------------------------------------------


def test_the_receipt_says_what_moved() -> None:
    usage = Usage(
        prompt_tokens=263,
        reused_tokens=245,
        reprefilled_tokens=7,
        reprefill_reason="window_gone",
        generated_tokens=28,
        stop_reason="length",
        ttft_ms=35.2,
        elapsed_ms=1234,
        state_version=3,
        seed=42,
        swap=Swap(evicted=["local/writer/main"], restored=True, bytes=5_650_000, ms=30.0),
    )
    assert receipt(usage) == (
        "[prompt 263 (245 re-used); generated 28 (length); first token after 35 ms, all 1.23 s; "
        "re-prefilled 7: window_gone; evicted local/writer/main; KV restored, 5.39 MiB in 30 ms; "
        "seed 42, version 3]"
    )
