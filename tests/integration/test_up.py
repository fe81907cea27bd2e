"""``conductor up``: what keeps it from starting, how it ends, and that its successor goes on."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest
from conductor_up import DEVICE, Up
from scene import NO_END, WAIT_S, model, some_tokens, until

from vram_conductor.client import Conductor
from vram_conductor.client.reply import Result

TURNS = [some_tokens(40, seed) for seed in range(3)]


def turn(conductor: Conductor, number: int, conversation: str = "main") -> Result:
    reply = conductor.decode(
        "a",
        tokens=TURNS[number],
        continue_=True,
        conversation=conversation,
        temperature=0,
        max_tokens=12,
        logit_bias=NO_END,
        return_ids=True,
    )
    return reply.result(WAIT_S)


# --- what keeps it from starting --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[broker]\nclienst = 'x'\n" + DEVICE, "clienst"),
        (DEVICE + "capacty = 5\n", "capacty"),
        (DEVICE.replace("256 MiB", "much"), "much"),
        ("[worker\n", "conductor.toml"),
        ("[broker]\n", "[[device]]"),
        ("[surprise]\nkey = 1\n" + DEVICE, "surprise"),
    ],
)
def test_a_wrong_configuration_is_named_and_nothing_is_started(
    short_tmp: Path, text: str, says: str
) -> None:
    text = text.replace("[broker]\n", f'[broker]\nruntime_dir = "{short_tmp}/r"\n')
    with Up(short_tmp, text=text) as up:
        assert up.process.wait(WAIT_S) != 0
        assert up.said is None
        assert says in up.log
        assert "Traceback" not in up.log
    assert not (short_tmp / "r").exists()


def test_taken_addresses_are_refused_and_whoever_has_them_goes_on(short_tmp: Path) -> None:
    with Up(short_tmp) as first, Conductor(first.endpoint) as conductor:
        until(lambda: conductor.status().devices[0].worker, "there is a worker")
        conductor.register("a", model(), n_ctx=512)
        expected = [turn(conductor, number, "reference").ids for number in range(3)]
        broker = next(child for child in first.children() if "broker" in " ".join(child.cmdline()))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            attempts = [
                (short_tmp, "", f"pid {first.process.pid}"),  # the same state
                (short_tmp / "2", f'clients = "{first.endpoint}"', f"process {broker.pid}"),
                (short_tmp / "3", f'clients = "tcp://127.0.0.1:{port}"', "in use"),
            ]
            found: list[list[int]] = []
            for number, (folder, lines, says) in enumerate(attempts):
                folder.mkdir(exist_ok=True)
                with Up(folder, broker=lines) as second:
                    assert second.process.wait(WAIT_S) in (5, 69), "already up, or unavailable"
                    assert second.said is None
                    assert says in second.log
                    assert "Traceback" not in second.log
                found.append(turn(conductor, number).ids)
        assert found == expected


# --- how it ends ------------------------------------------------------------------------------


def test_sigterm_parks_everything_and_a_successor_adopts_it(short_tmp: Path) -> None:
    with Up(short_tmp) as up, Conductor(up.endpoint) as conductor:
        until(lambda: conductor.status().devices[0].worker, "there is a worker")
        conductor.register("a", model(), n_ctx=512)
        expected = [turn(conductor, number, "reference").ids for number in range(3)]
        conductor.reset("a", "reference")
        found = [turn(conductor, number).ids for number in range(2)]
        before = conductor.status()
        children = up.children()
        assert len(children) >= 2, "a broker and a worker"
        assert up.terminate() == 0
    until(lambda: not any(child.is_running() for child in children), "all processes are gone")
    assert len(up.parked()) == 1
    with Up(short_tmp) as up, Conductor(up.endpoint) as conductor:
        until(lambda: conductor.status().agents[0].state == "ready", "the agent is back")
        after = conductor.status()
        assert after.broker_epoch > before.broker_epoch
        assert after.devices[0].promised.lines == before.devices[0].promised.lines
        talks = {talk.conversation: talk for talk in after.agents[0].conversations}
        talk = talks["main"]
        assert (talk.tokens, talk.version) == (2 * 52, 2)
        last = turn(conductor, 2)
        assert [*found, last.ids] == expected
        # Nothing was computed again: 103 of its 104 tokens had KV.
        assert (last.usage.reused_tokens, last.usage.reprefilled_tokens) == (103, 0)
        assert last.usage.swap.restored
        assert last.usage.state_version == 3


def test_parked_states_that_no_broker_knows_are_deleted(short_tmp: Path) -> None:
    with Up(short_tmp) as up, Conductor(up.endpoint) as conductor:
        until(lambda: conductor.status().devices[0].worker, "there is a worker")
        conductor.register("a", model(), n_ctx=512)
        expected = turn(conductor, 0).ids
        assert up.terminate() == 0
    assert len(up.parked()) == 1
    # With the journal the index is lost, and nobody will ever ask for them.
    shutil.rmtree(short_tmp / "state")
    with Up(short_tmp) as up, Conductor(up.endpoint) as conductor:
        until(lambda: conductor.status().devices[0].worker, "there is a worker")
        until(lambda: not up.parked(), "they are gone")
        assert conductor.list() == []
        conductor.register("a", model(), n_ctx=512)
        again = turn(conductor, 0)
        assert again.ids == expected
        assert (again.usage.reused_tokens, again.usage.state_version) == (0, 1)


def test_sigterm_in_the_middle_of_an_answer_lets_it_finish(short_tmp: Path) -> None:
    with Up(short_tmp) as up, Conductor(up.endpoint) as conductor:
        until(lambda: conductor.status().devices[0].worker, "there is a worker")
        conductor.register("a", model(), n_ctx=2048)
        reply = conductor.decode("a", tokens=TURNS[0], max_tokens=600, logit_bias=NO_END)
        next(reply)
        up.process.send_signal(signal.SIGTERM)
        assert reply.result(WAIT_S).usage.generated_tokens == 600
        assert up.process.wait(WAIT_S) == 0


def test_nothing_outlives_a_supervisor_that_is_killed(short_tmp: Path) -> None:
    with Up(short_tmp) as up, Conductor(up.endpoint) as conductor:
        until(lambda: conductor.status().devices[0].worker, "there is a worker")
        children = up.children()
        assert len(children) >= 2
        up.kill()
        until(
            lambda: all(
                not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
                for child in children
            ),
            "broker, worker and its children are gone",
        )
