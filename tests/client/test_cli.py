"""The command line as a whole: flags, exit codes, errors, pipes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_broker import Peer, ScriptedBroker, nothing

from vram_conductor.client import cli
from vram_conductor.client.complaint import explain
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    ErrorInfo,
    error_from_info,
)

CONDUCTOR = [sys.executable, "-m", "vram_conductor.client.cli"]
COMMANDS = [
    ["up"],
    ["broker"],
    ["worker"],
    ["status"],
    ["list"],
    ["register"],
    ["unregister"],
    ["reset"],
    ["decode"],
    ["models"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "verify"],
    ["doctor"],
    ["demo"],
]


def conductor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CONDUCTOR, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


@pytest.fixture
def nobody(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An endpoint where no broker is, known to the command line."""
    endpoint = f"ipc://{short_tmp}/nobody.ipc"
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", endpoint)
    monkeypatch.setattr("vram_conductor.client.cli_agents.Conductor", impatient)
    return endpoint


def impatient(endpoint: str | None, **options: Any) -> Any:
    from vram_conductor.client.sync import Conductor

    return Conductor(endpoint, connect_timeout_s=0.2, **options)


# --- help and usage ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_in_80_columns(command: list[str]) -> None:
    done = conductor(*command, "--help", COLUMNS="80")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("usage: ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Traceback" not in done.stdout


def test_the_overview_names_every_command_and_exit_code(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command[0]} " in text
    for code in (*cli._EXIT.values(), cli.EXIT_DENIED, cli.EXIT_INTERRUPTED, cli.EXIT_TERMINATED):
        assert f" {code} " in text


def test_nothing_to_do_is_wrong_usage(capsys: Any) -> None:
    assert cli.main([]) == 2
    assert "a first session:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["register", "a"],
        ["register", "a", "--model", "m", "--n-ctx", "many"],
        ["register", "a", "--model", "m", "--kv-type", "q2"],
        ["decode", "a"],
        ["models"],
        ["models", "pull"],
        ["status", "--wat"],
        ["stat"],
        ["status", "--js"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: conductor" in err
    assert len(err.splitlines()) == 2


def test_the_usage_is_that_of_the_command_that_was_meant(capsys: Any) -> None:
    said: list[Any] = []
    for arguments in (["register", "a"], ["status", "--wat"], ["models", "pull"], ["stat"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        said.append(capsys.readouterr().err.splitlines())
    assert said[0] == [
        "usage: conductor register --model MODEL AGENT  (flags: conductor register --help)",
        "conductor register: error: the following arguments are required: --model",
    ]
    assert said[1] == [
        "usage: conductor status  (flags: conductor status --help)",
        "conductor status: error: unrecognized arguments: --wat",
    ]
    assert said[2][0].startswith("usage: conductor models pull NAME [NAME ...]  (")
    assert said[3][0] == "usage: conductor COMMAND ...  (flags: conductor --help)"


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("conductor 0.")


@pytest.mark.parametrize("part", ["broker", "worker"])
def test_broker_and_worker_have_their_own_flags(part: str) -> None:
    help_ = conductor(part, "--help")
    assert help_.stdout.startswith(f"usage: conductor {part} ")
    wrong = conductor(part, "--no-such-flag")
    assert wrong.returncode == 64
    assert "--no-such-flag" in wrong.stderr


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    "arguments",
    [["status"], ["list"], ["unregister", "a"], ["decode", "a", "x"], ["reset", "a"]],
    ids=" ".join,
)
def test_nobody_answers(arguments: list[str], capsys: Any) -> None:
    assert cli.main(arguments) == 6
    out, err = capsys.readouterr()
    assert out == ""
    assert "start it with `conductor up`" in err
    assert err.startswith("conductor: ")
    assert err.endswith("(no_broker)\n")


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("arguments", [["status", "--json"], ["--json", "status"]], ids=" ".join)
def test_an_error_is_json_too(arguments: list[str], capsys: Any) -> None:
    assert cli.main(arguments) == 6
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["code"], error["reason"], error["retryable"]) == (
        "UNAVAILABLE",
        "no_broker",
        True,
    )
    assert "no broker answers" in err


def test_a_flag_before_the_command_counts_as_much(broker: ScriptedBroker, capsys: Any) -> None:
    for arguments in (["--json", "list"], ["list", "--json"]):
        assert cli.main([*arguments, "--clients", broker.endpoint]) == 0
        assert json.loads(capsys.readouterr().out) == {"agents": []}


@pytest.mark.parametrize(
    ("text", "says"),
    [("[broker\n", "c.toml"), ("[broker]\nclienst = 1\n", "clienst"), (None, "cannot read")],
)
def test_a_wrong_configuration(tmp_path: Path, text: str | None, says: str, capsys: Any) -> None:
    config = tmp_path / "c.toml"
    if text is not None:
        config.write_text(text)
    for command in (["status"], ["up"], ["models", "list"]):
        assert cli.main([*command, "--config", str(config)]) == 8
        err = capsys.readouterr().err
        assert says in err
        assert "(bad_config)" in err


def test_the_environment_lies_over_the_file(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[broker]\nclients = "ipc:///nowhere"\n')
    monkeypatch.setenv("VRAM_CONDUCTOR_BROKER_CLIENTS", broker.endpoint)
    assert cli.main(["list", "--config", str(config)]) == 0
    monkeypatch.setenv("VRAM_CONDUCTOR_BROKER_CLIENTS", "nonsense")
    assert cli.main(["list", "--config", str(config)]) == 8
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["nonsense", "ipc://", "tcp://127.0.0.1", "http://x:1"])
def test_a_wrong_endpoint(endpoint: str, capsys: Any) -> None:
    assert cli.main(["status", "--clients", endpoint]) == 8
    assert "(bad_endpoint)" in capsys.readouterr().err


EXITS = {
    Code.NOT_FOUND: 4,
    Code.ALREADY_EXISTS: 5,
    Code.UNAVAILABLE: 6,
    Code.DEADLINE_EXCEEDED: 6,
    Code.RESOURCE_EXHAUSTED: 7,
    Code.INVALID_ARGUMENT: 8,
    Code.OUT_OF_RANGE: 8,
    Code.PERMISSION_DENIED: 9,
    Code.UNAUTHENTICATED: 9,
}


@pytest.mark.parametrize("code", list(Code))
def test_exit_codes(broker: ScriptedBroker, code: Code, capsys: Any) -> None:
    def fail(peer: Peer, message: wire.Unregister) -> None:
        peer.fail(message.rid, ErrorInfo(code, "some_reason", "because", retry_after_ms=2000))

    broker.on[wire.Unregister] = fail
    status = cli.main(["unregister", "a", "--clients", broker.endpoint])
    assert status == EXITS.get(code, 1)
    err = capsys.readouterr().err
    assert err == "conductor: because (some_reason)\nconductor: try again in 2.00 s\n"


def test_a_refusal_is_one_line_with_its_own_exit_code(broker: ScriptedBroker, capsys: Any) -> None:
    text = "VRAM_LEDGER_DENY code=CAP device=cpu requested=1GiB largest_n_ctx=512"

    def deny(peer: Peer, message: wire.Register) -> None:
        peer.fail(message.rid, ErrorInfo(Code.OUT_OF_RANGE, "VRAM_LEDGER_DENY", text))

    broker.on[wire.Register] = deny
    assert cli.main(["register", "a", "--model", "m", "--clients", broker.endpoint]) == 3
    assert capsys.readouterr().err == f"conductor: {text}\n"


def explained(reason: str, message: str = "no", **details: Any) -> list[str]:
    error: ConductorError = error_from_info(
        ErrorInfo(Code.ALREADY_EXISTS, reason, message, details=details)
    )
    return explain(error)


@pytest.mark.parametrize("command", ["unregister", "reset"])
def test_who_removes_what_is_not_there_is_not_told_to_add_it(
    broker: ScriptedBroker, capsys: Any, command: str
) -> None:
    error = ErrorInfo(Code.NOT_FOUND, "no_such_agent", "no agent", details={"agent": "a"})
    for kind in (wire.Unregister, wire.Reset):
        broker.on[kind] = lambda peer, message: peer.send(wire.Error(rid=message.rid, error=error))
    assert cli.main([command, "a", "--clients", broker.endpoint]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["conductor: no agent (no_such_agent)", "conductor: see: conductor list"]


def test_hints_say_what_to_type() -> None:
    assert explained("no_such_agent", agent="coder")[1] == (
        "see: conductor list; add it: conductor register coder --model MODEL"
    )
    assert explained(
        "agent_exists", agent="coder", differences={"n_ctx": [4096, 512], "slots": [1, 2]}
    )[1] == (
        "n_ctx is 4096, not 512, slots is 1, not 2; remove it first: conductor unregister coder"
    )
    assert explained("agent_exists", agent="a", differences={"device": [None, "cpu"]})[1] == (
        "device is not given (best fit), not cpu; remove it first: conductor unregister a"
    )
    assert "--raw" in explained("no_chat_template")[1]
    assert explained("something_else") == ["no (something_else)"]


@pytest.mark.parametrize("differences", [None, 5, {"n_ctx": 5}, {"n_ctx": [1]}, []])
def test_hints_survive_odd_details(differences: Any) -> None:
    assert explained("agent_exists", agent="a", differences=differences)[1] == (
        "remove it first: conductor unregister a"
    )


# --- signals and pipes ------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CONDUCTOR, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_signals_while_waiting_for_an_answer(
    broker: ScriptedBroker, number: int, code: int
) -> None:
    broker.on[wire.Status] = nothing
    with start("status", "--clients", broker.endpoint) as waiting:
        broker.expect(wire.Status)
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=30)
        assert waiting.returncode == code
    assert out == ""
    assert "Traceback" not in err
    broker.expect(wire.Bye)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_has_gone_is_no_failure(broker: ScriptedBroker, flags: list[str]) -> None:
    answer = broker.on[wire.List]
    held: list[tuple[Peer, wire.List]] = []
    broker.on[wire.List] = lambda peer, message: held.append((peer, message))
    with start("list", *flags, "--clients", broker.endpoint) as listing:
        broker.expect(wire.List)
        assert listing.stdout is not None
        assert listing.stderr is not None
        listing.stdout.close()
        answer(*held[0])
        assert listing.stderr.read() == ""
        assert listing.wait(30) == 0


def test_an_error_for_a_reader_that_has_gone(broker: ScriptedBroker) -> None:
    held: list[tuple[Peer, wire.Unregister]] = []
    broker.on[wire.Unregister] = lambda peer, message: held.append((peer, message))
    with start("unregister", "a", "--json", "--clients", broker.endpoint) as asking:
        broker.expect(wire.Unregister)
        assert asking.stdout is not None
        assert asking.stderr is not None
        asking.stdout.close()
        peer, message = held[0]
        peer.fail(message.rid, ErrorInfo(Code.NOT_FOUND, "no_such_agent", "no such agent"))
        assert "no such agent" in asking.stderr.read()
        assert asking.wait(30) == 4


def test_a_full_disk_is_said_in_one_line(broker: ScriptedBroker) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*CONDUCTOR, "list", "--clients", broker.endpoint],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "conductor: No space left on device (os_error)\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_who_closes_stdout_hears_nothing(broker: ScriptedBroker, closed: str) -> None:
    command = shlex.join([*CONDUCTOR, "list", "--clients", broker.endpoint])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == b""
    assert bool(done.stdout) == (closed == "2>&-")


def test_a_locale_without_unicode_shows_question_marks(broker: ScriptedBroker) -> None:
    broker.pieces = ("ünïcode ", "👩")
    done = subprocess.run(
        [*CONDUCTOR, "decode", "a", "x", "--clients", broker.endpoint],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"?n?code ?\n"
