"""Connections over tcp, with keys, that are cut while an answer comes: every token once, in order.

Broker and worker are real processes; between them, and between client and broker, lies a proxy
that closes connections or lets nothing pass. What an answer must be, an uncut run says.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cuttable_proxy import CuttableProxy
from keyed_broker import KeyedBroker, until_in
from scene import NO_END, PLAIN, model, some_tokens, until
from worker_process import WorkerProcess

from vram_conductor.client import Conductor
from vram_conductor.client.reply import Reply, Result
from vram_conductor.protocol.errors import Unavailable

N_CTX = 2048
LENGTH = 700
"""Tokens of an answer: enough to be cut several times in the middle."""

WAIT_S = 120.0
PROMPT = some_tokens(20, 7)


class Wires:
    """A broker with keys, and a worker and a client behind a proxy each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.broker = KeyedBroker(folder)
        stack.enter_context(self.broker)
        worker_key = self.broker.keys.new("gpu", "worker")
        client_key = self.broker.keys.new("alice", "admin")
        direct = until_in(self.broker, client_key)
        self.to_worker = stack.enter_context(CuttableProxy(None, self.broker.endpoints["workers"]))
        self.to_client = stack.enter_context(CuttableProxy(None, self.broker.endpoints["clients"]))
        flags = ["--key", str(worker_key), "--model-dirs", str(Path(model(PLAIN)).parent)]
        self.worker = stack.enter_context(
            WorkerProcess(folder / "w", self.to_worker.endpoint, *flags)
        )
        self.watcher = direct
        until(lambda: self.workers() == 1, "the worker is welcomed")
        self.client = stack.enter_context(
            Conductor(self.to_client.endpoint, key=client_key, client="cut")
        )
        self.client.register("coder", model(PLAIN), n_ctx=N_CTX, temperature=0)
        self.expected = self.start("uncut").result(WAIT_S)
        assert len(set(self.expected.ids)) > 20, "one that repeats itself proves nothing"

    def workers(self) -> int:
        return sum(device.worker is not None for device in self.watcher.status().devices)

    def start(self, conversation: str) -> Reply:
        return self.client.decode(
            "coder",
            tokens=PROMPT,
            conversation=conversation,
            max_tokens=LENGTH,
            temperature=0,
            logit_bias=NO_END,
            return_ids=True,
        )

    def check(self, found: Result) -> None:
        """The same answer, in one attempt, and a record that agrees with it."""
        assert found.ids == self.expected.ids
        assert found.text == self.expected.text
        assert found.usage.generated_tokens == LENGTH
        assert found.usage.state_version == 1


@pytest.fixture(scope="module")
def wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wires]:
    with ExitStack() as stack:
        yield Wires(tmp_path_factory.mktemp("cut"), stack)


def read(reply: Reply, pieces: int) -> None:
    for _ in range(pieces):
        next(reply)


def count(text: str, what: str) -> int:
    return text.count(what)


def test_the_workers_connection_is_closed_several_times(wires: Wires) -> None:
    # A worker may be back before the broker has noticed that it was away.
    resumed = count(wires.worker.log, "the session goes on")
    reply = wires.start("worker-closed")
    for _ in range(3):
        read(reply, 50)
        wires.to_worker.cut()
    wires.check(reply.result(WAIT_S))
    assert count(wires.worker.log, "the session goes on") > resumed
    assert "session lost" not in wires.worker.log


def test_the_workers_network_is_away_for_a_while(wires: Wires) -> None:
    reply = wires.start("worker-away")
    read(reply, 50)
    wires.to_worker.go_down()
    away = until(
        lambda: any(job.waiting == "worker" for job in wires.watcher.status().jobs),
        "STATUS says what the job waits for",
    )
    assert away
    wires.to_worker.heal()
    wires.check(reply.result(WAIT_S))
    assert "session lost" not in wires.worker.log


def test_the_workers_network_is_silent_for_longer_than_a_peer_may_be(wires: Wires) -> None:
    resumed = count(wires.worker.log, "the session goes on")
    reply = wires.start("worker-silent")
    read(reply, 50)
    wires.to_worker.fall_silent()
    until(lambda: "the broker is silent" in wires.worker.log, "the worker notices")
    wires.to_worker.heal()
    wires.check(reply.result(WAIT_S))
    assert count(wires.worker.log, "the session goes on") == resumed + 1
    assert "session lost" not in wires.worker.log


@pytest.mark.parametrize("window", [None, 1, 16])
def test_the_clients_connection_is_closed_several_times(wires: Wires, window: int | None) -> None:
    reply = wires.client.decode(
        "coder",
        tokens=PROMPT,
        conversation=f"client-closed-{window}",
        max_tokens=LENGTH,
        temperature=0,
        logit_bias=NO_END,
        return_ids=True,
        window=window,
    )
    for _ in range(3):
        read(reply, 30)
        wires.to_client.cut()
    wires.check(reply.result(WAIT_S))


def test_the_clients_network_is_silent_for_longer_than_a_peer_may_be(wires: Wires) -> None:
    connections = wires.to_client.connections
    reply = wires.start("client-silent")
    read(reply, 50)
    wires.to_client.fall_silent()
    # The client gives the connection up and makes another, which the wire holds up, too.
    until(lambda: wires.to_client.connections > connections, "the client dials again")
    wires.to_client.heal()
    wires.check(reply.result(WAIT_S))


def test_both_networks_break_at_once(wires: Wires) -> None:
    reply = wires.start("both")
    read(reply, 50)
    wires.to_worker.go_down()
    wires.to_client.go_down()
    until(lambda: "worker_away" in wires.broker.log, "the broker notices")
    wires.to_client.heal()
    wires.to_worker.heal()
    wires.check(reply.result(WAIT_S))


def test_a_job_whose_prompt_was_on_its_way_runs_once(wires: Wires) -> None:
    """Cut before the first token, on both sides, at once after the request left."""
    replies: list[Reply] = []
    for index in range(4):
        replies.append(wires.start(f"early-{index}"))
        (wires.to_worker if index % 2 else wires.to_client).cut()
    for reply in replies:
        wires.check(reply.result(WAIT_S))


def test_a_worker_that_is_gone_for_too_long_is_given_up(short_tmp: Path) -> None:
    broker = KeyedBroker(short_tmp, *patience(short_tmp, 500))
    with broker, CuttableProxy(None, broker.endpoints["workers"]) as wire:
        key = broker.keys.new("gpu", "worker")
        watcher = until_in(broker, broker.keys.new("alice", "admin"))
        flags = ["--key", str(key), "--model-dirs", str(Path(model(PLAIN)).parent)]
        with WorkerProcess(short_tmp / "w", wire.endpoint, *flags) as worker:
            until(lambda: any(d.worker for d in watcher.status().devices), "the worker is welcomed")
            watcher.register("coder", model(PLAIN), n_ctx=N_CTX, temperature=0)
            reply = watcher.decode(
                "coder", tokens=PROMPT, max_tokens=LENGTH, logit_bias=NO_END, return_ids=True
            )
            read(reply, 50)
            wire.go_down()
            with pytest.raises(Unavailable) as caught:
                reply.result(WAIT_S)
            assert caught.value.reason == "worker_lost"
            wire.heal()
            again = watcher.decode("coder", tokens=PROMPT, max_tokens=4, continue_=True)
            assert again.result(WAIT_S).usage.generated_tokens == 4
            assert "session lost" in worker.log


def patience(folder: Path, resume_ms: int) -> list[str]:
    """Flags for a broker that holds a worker's session for so long."""
    config = folder / "broker.toml"
    config.write_text(f"[broker]\nresume_ms = {resume_ms}\n")
    return ["--config", str(config)]


def test_a_worker_that_leaves_while_its_network_is_away_says_the_rest_first(
    short_tmp: Path,
) -> None:
    with ExitStack() as stack:
        wires = Wires(short_tmp, stack)
        # Before it begins: the rest may be said and parked before the worker notices the cut.
        parked = len(wires.worker.files())
        reply = wires.start("leaves")
        while len(reply.ids) < LENGTH - 60:
            next(reply)
        wires.to_worker.go_down()
        until(lambda: "the work goes on" in wires.worker.log, "the worker notices")
        wires.worker.process.send_signal(signal.SIGTERM)
        until(lambda: len(wires.worker.files()) > parked, "what ran is done, and parked")
        wires.to_worker.heal()
        wires.check(reply.result(WAIT_S))
        assert wires.worker.process.wait(WAIT_S) == 0
