"""``conductor status, list, register, unregister, reset`` against a scripted broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import msgspec
from scripted_broker import Peer, ScriptedBroker, eventually
from terminal import Terminal

from vram_conductor.client import cli, cli_agents
from vram_conductor.client.requests import SamplingOptions
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.conversations import History, HistoryPage, Turn
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.status import AgentStatus, StatusReport
from vram_conductor.protocol.values import Sampling

CONDUCTOR = [sys.executable, "-m", "vram_conductor.client.cli"]


def run(broker: ScriptedBroker, *arguments: str) -> int:
    return cli.main([*arguments, "--clients", broker.endpoint])


# --- register ---------------------------------------------------------------------------------


def test_register_sends_only_what_was_given(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "register", "coder", "--model", "m") == 0
    (message,) = broker.of(wire.Register)
    assert message == wire.Register(rid=message.rid, agent="coder", model="m")
    assert (message.n_ctx, message.kv_type) == (None, None), "the broker's defaults"
    assert capsys.readouterr().out.startswith("coder admitted on cpu in ")


def test_register_sends_all_that_was_given(broker: ScriptedBroker) -> None:
    flags = [
        "--n-ctx",
        "512",
        "--kv-type",
        "q8_0",
        "--device",
        "cpu",
        "--slots",
        "2",
        "--priority",
        "-3",
        "--ttl",
        "1m",
        "--linger",
        "30s",
    ]
    sampling = [
        "--temperature",
        "0",
        "--top-k",
        "0",
        "--top-p",
        "0.5",
        "--min-p",
        "0",
        "--repeat-penalty",
        "1.1",
        "--presence-penalty",
        "-1",
        "--frequency-penalty",
        "0",
        "--penalty-last-n",
        "-1",
        "--seed",
        "0",
    ]
    assert run(broker, "register", "coder", "--model", "m", *flags, *sampling) == 0
    (message,) = broker.of(wire.Register)
    assert message == wire.Register(
        rid=message.rid,
        agent="coder",
        model="m",
        n_ctx=512,
        kv_type="q8_0",
        device="cpu",
        slots=2,
        priority=-3,
        ttl_s=60,
        linger_s=30,
        sampling=Sampling(
            temperature=0,
            top_k=0,
            top_p=0.5,
            min_p=0,
            repeat_penalty=1.1,
            presence_penalty=-1,
            frequency_penalty=0,
            penalty_last_n=-1,
            seed=0,
        ),
    )


def test_every_sampling_parameter_has_a_flag() -> None:
    assert list(cli_agents.SAMPLING) == list(SamplingOptions.__annotations__)


def test_what_register_says(broker: ScriptedBroker, capsys: Any) -> None:
    def admit(peer: Peer, message: wire.Register) -> None:
        note = "the default n_ctx 4096 is beyond the 2048 tokens that m was trained with"
        peer.send(wire.Progress(rid=message.rid, stage="estimate"))
        peer.send(wire.Progress(rid=message.rid, stage="estimate", note=note))
        peer.send(wire.Progress(rid=message.rid, stage="load", total=98_362_432))
        status = AgentStatus(
            principal="local",
            agent="coder",
            model="m",
            model_id="x",
            device="cpu",
            state="ready",
            n_ctx=2048,
            weights_bytes=96_587_254,
            pool_bytes=49_388_896,
            state_bytes=47_000_000,
            unmeasured=True,
            shared_with=["local/reviewer"],
        )
        peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(status)))

    broker.on[wire.Register] = admit
    assert run(broker, "register", "coder", "--model", "m") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith(": m, n_ctx 2048, KV f16")
    assert out.splitlines()[1:] == [
        "  weights       92.1 MiB, shared with local/reviewer",
        "  pool          47.1 MiB (an estimate: it is made at first use)",
        "  parked state  44.8 MiB at most, in shared memory",
    ]
    assert err == "the default n_ctx 4096 is beyond the 2048 tokens that m was trained with\n"
    assert run(broker, "register", "coder", "--model", "m", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["weights_bytes"] == 96_587_254


def test_a_slow_load_shows_life_on_a_terminal(broker: ScriptedBroker) -> None:
    def load(peer: Peer, message: wire.Register) -> None:
        peer.send(wire.Progress(rid=message.rid, stage="worker"))
        held.append((peer, message))

    held: list[tuple[Peer, wire.Register]] = []
    admit, broker.on[wire.Register] = broker.on[wire.Register], load
    command = [*CONDUCTOR, "register", "c", "--model", "m", "--clients", broker.endpoint]
    with Terminal(command) as terminal:
        terminal.expect("waiting for a worker for m … ")
        peer, message = held[0]
        peer.send(wire.Progress(rid=message.rid, stage="load", total=98_362_432))
        terminal.expect("loading m, 93.8 MiB … ")
        terminal.expect("1.0")  # seconds: it moves
        admit(*held[0])
        assert terminal.wait() == 0
    # The line is gone when the result is there.
    assert "\r\x1b[K" + "c admitted on cpu" in terminal.raw


# --- the others -------------------------------------------------------------------------------


def test_an_ephemeral_agent_stays_as_long_as_the_command(broker: ScriptedBroker) -> None:
    command = [*CONDUCTOR, "register", "temp", "--model", "m", "--ephemeral", "--ttl-s", "90"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, "--clients", broker.endpoint], stdout=pipe, stderr=pipe, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("temp stays until this command ends")
    (message,) = broker.of(wire.Register)
    assert (message.ephemeral, message.ttl_s) == (True, 90)
    assert not broker.of(wire.Bye)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("temp admitted on cpu in ")
    eventually(lambda: len(broker.of(wire.Bye)) == 1, "it says good-bye")


def test_unregister_and_reset(broker: ScriptedBroker, capsys: Any) -> None:
    run(broker, "register", "coder", "--model", "m")
    assert run(broker, "reset", "coder", "--conversation", "plan") == 0
    (reset,) = broker.of(wire.Reset)
    assert (reset.agent, reset.conversation) == ("coder", "plan")
    assert run(broker, "reset", "coder", "--json") == 0
    assert run(broker, "unregister", "coder") == 0
    out = capsys.readouterr().out
    assert "coder has forgotten its conversation plan\n" in out
    assert '"version": 1' in out
    assert out.endswith("coder is gone\n")
    assert run(broker, "unregister", "coder") == 4


def test_list(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "list") == 0
    assert capsys.readouterr().out.startswith("no agents; add one with: conductor register")
    run(broker, "register", "coder", "--model", "m")
    capsys.readouterr()
    assert run(broker, "list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["agent", "coder"]
    assert run(broker, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["agents"][0]["agent"] == "coder"


def test_status(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "status") == 0
    assert capsys.readouterr().out.startswith("broker scripted, serving for ")
    assert run(broker, "status", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert msgspec.convert(value, StatusReport).version == "scripted"


def test_status_in_a_terminal_is_as_wide_as_it(broker: ScriptedBroker) -> None:
    def report(peer: Peer, message: wire.Status) -> None:
        whole = StatusReport(broker_epoch=1, journal_trouble="many words " * 20)
        peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(whole)))

    broker.on[wire.Status] = report
    for columns in (80, 120):
        command = [*CONDUCTOR, "status", "--clients", broker.endpoint]
        with Terminal(command, columns=columns) as terminal:
            assert terminal.wait() == 0
        longest = max(map(len, terminal.text.splitlines()))
        assert columns - 15 < longest <= columns


def test_watch_draws_again_until_ctrl_c(broker: ScriptedBroker) -> None:
    agents = [
        AgentStatus(
            principal="local",
            agent=f"agent-{index}",
            model="m",
            model_id="x",
            device="cpu",
            state="ready",
            n_ctx=1,
        )
        for index in range(60)
    ]

    def report(peer: Peer, message: wire.Status) -> None:
        whole = StatusReport(broker_epoch=1, agents=agents, agents_total=60)
        peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(whole)))

    broker.on[wire.Status] = report
    command = [*CONDUCTOR, "status", "--watch", "0.1", "--clients", broker.endpoint]
    with Terminal(command, columns=80, rows=24) as terminal:
        terminal.expect("more lines: enlarge the window")
        eventually(lambda: len(broker.of(wire.Status)) >= 3, "it asks again")
        terminal.press("\x03")
        assert terminal.wait() == 130
    screens = terminal.raw.split("\x1b[H")[1:]
    assert len(screens) >= 2
    assert all(screen.count("\n") < 24 for screen in screens[:-1]), "nothing scrolls away"
    assert "agent-0" in screens[0]


def test_watch_without_a_terminal_is_one_value_a_line(broker: ScriptedBroker) -> None:
    answer = broker.on[wire.Status]

    def thrice(peer: Peer, message: wire.Status) -> None:
        if len(broker.of(wire.Status)) <= 3:
            answer(peer, message)
        else:
            peer.fail(message.rid, ErrorInfo(Code.PERMISSION_DENIED, "enough", "enough"))

    broker.on[wire.Status] = thrice
    import subprocess

    done = subprocess.run(
        [*CONDUCTOR, "status", "--json", "--watch", "0.01", "--clients", broker.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 9
    values = [json.loads(line) for line in done.stdout.splitlines()[:3]]
    assert [value["version"] for value in values] == ["scripted"] * 3


def test_a_talk_in_json_has_one_value_per_line_errors_too(broker: ScriptedBroker) -> None:
    said = HistoryPage(
        conversation="main", version=1, tokens=3, turns_total=1, turns=[Turn(role="user", text="a")]
    )
    broker.on[History] = lambda peer, message: peer.send(
        wire.Ok(rid=message.rid, body=msgspec.to_builtins(said))
    )
    done = subprocess.run(
        [*CONDUCTOR, "chat", "coder", "--json", "--clients", broker.endpoint],
        input="hello\n/history\n/nosuch\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 8, done.stderr
    values = [json.loads(line) for line in done.stdout.splitlines()]
    assert [next(iter(value)) for value in values] == ["text", "turns", "error"]
    assert values[-1]["error"]["reason"] == "bad_value"


def test_a_watch_that_ends_with_an_error_has_it_on_a_line(broker: ScriptedBroker) -> None:
    broker.on[wire.Status] = lambda peer, message: peer.fail(
        message.rid, ErrorInfo(Code.PERMISSION_DENIED, "role_denied", "not yours")
    )
    done = subprocess.run(
        [*CONDUCTOR, "status", "--json", "--watch", "0.1", "--clients", broker.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"]["reason"] == "role_denied"
