"""Three hosts, each in a network namespace of its own: slow and lossy wires, and cuts that heal.

Broker, worker and client are real processes, with keys; what an answer must be, the same hosts say
over a wire without faults.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from keyed_broker import KeyedBroker, Keys
from network import Host, Network, why_not
from scene import NO_END, PLAIN, model, some_tokens, until
from worker_process import WorkerProcess

WAIT_S = 120.0
LENGTH = 500
CLIENTS, WORKERS = 7800, 7801

CLIENT = """
import json, sys
from vram_conductor.client import Conductor
from vram_conductor.protocol.errors import ConductorError

endpoint, key, job = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    with Conductor(endpoint, key=key, connect_timeout_s=5) as conductor:
        conductor.register("coder", job.pop("model"), n_ctx=2048, temperature=0)
        reply = conductor.decode("coder", return_ids=True, **job)
        for piece in reply:
            print(json.dumps({"piece": piece}), flush=True)
        result = reply.result()
        usage = result.usage
        told = {"ids": result.ids, "text": result.text, "version": usage.state_version}
except ConductorError as error:
    told = {"error": error.reason}
print(json.dumps(told), flush=True)
"""


@dataclass
class Answer:
    """One client process on its host, and what it has read so far."""

    process: subprocess.Popen[bytes]
    pieces: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            if "piece" in found:
                self.pieces.append(found["piece"])
            else:
                self.told.update(found)

    def reaches(self, count: int) -> None:
        until(lambda: self.told or len(self.pieces) >= count, f"{count} pieces")

    def end(self) -> dict[str, Any]:
        until(lambda: self.told, "the answer is complete", WAIT_S)
        return self.told


class Hosts:
    """A broker, a worker and clients, each on a host of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.network = stack.enter_context(Network())
        self.broker_host, self.worker_host, self.client_host = (
            self.network.host(name) for name in ("broker", "worker", "client")
        )
        keys = Keys(folder)
        worker_key = keys.new("gpu", "worker")
        self.client_key = keys.new("alice")
        at = f"tcp://{self.broker_host.address}"
        self.clients, self.workers = f"{at}:{CLIENTS}", f"{at}:{WORKERS}"
        endpoints = ("--clients", self.clients, "--workers", self.workers)
        self.broker = KeyedBroker(folder, *endpoints, enter=self.broker_host.enter)
        stack.enter_context(self.broker)
        self.worker = stack.enter_context(
            WorkerProcess(
                folder / "w",
                self.workers,
                "--key",
                str(worker_key),
                "--model-dirs",
                str(Path(model(PLAIN)).parent),
                enter=self.worker_host.enter,
            )
        )
        until(lambda: "worker_ready" in self.broker.log, "the worker is welcomed", WAIT_S)
        self.expected = self.ask("reference").end()
        assert len(set(self.expected["ids"])) > 20, self.expected

    def ask(self, conversation: str, tokens: int = LENGTH) -> Answer:
        """A client begins to read an answer."""
        job = {
            "model": model(PLAIN),
            "conversation": conversation,
            "tokens": some_tokens(20, 7),
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": list(NO_END.items()),
        }
        arguments = [self.clients, str(self.client_key), json.dumps(job)]
        process = subprocess.Popen(
            [*self.client_host.enter, sys.executable, "-c", CLIENT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        answer = Answer(process)
        reader = threading.Thread(target=answer.read, daemon=True)
        reader.start()

        def leave() -> None:
            process.kill()
            process.wait()
            reader.join(10)

        self.stack.callback(leave)
        return answer

    def away(self) -> int:
        """How often the broker began to wait for its worker."""
        return self.broker.log.count("worker_away")

    def silent(self) -> int:
        """How often the worker gave a connection up."""
        return self.worker.log.count("the broker is silent")

    def left(self) -> int:
        """How often the broker gave up a client's connection."""
        return self.broker.log.count("how=lost")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Hosts(tmp_path_factory.mktemp("hosts"), stack)


@pytest.fixture(autouse=True)
def whole_network(hosts: Hosts) -> Iterator[None]:
    yield
    network = hosts.network
    network.delay_ms = network.jitter_ms = network.loss = 0
    for host in (hosts.broker_host, hosts.worker_host, hosts.client_host):
        network.heal(host)


def test_delay_and_loss_change_no_token(hosts: Hosts) -> None:
    network = hosts.network
    network.delay_ms, network.jitter_ms, network.loss = 20, 10, 0.02
    lost = network.lost
    assert hosts.ask("lossy").end() == hosts.expected
    assert network.lost > lost


@pytest.mark.parametrize("cut_off", ["worker_host", "client_host", "broker_host"])
def test_a_cut_that_heals_costs_no_token(hosts: Hosts, cut_off: str) -> None:
    """Longer than the silence after which a peer counts as gone: every end has given its
    connections up by then, and nobody the job."""
    host: Host = getattr(hosts, cut_off)
    away, silent, left = hosts.away(), hosts.silent(), hosts.left()
    answer = hosts.ask(f"cut-{cut_off}")
    answer.reaches(30)
    hosts.network.cut(host)
    if cut_off != "client_host":
        until(lambda: hosts.silent() > silent, "the worker notices")
        until(lambda: hosts.away() > away, "the broker notices that the worker is away")
    if cut_off != "worker_host":
        until(lambda: hosts.left() > left, "the broker notices that the client is away")
    hosts.network.heal(host)
    assert answer.end() == hosts.expected
    assert "session lost" not in hosts.worker.log
    assert "worker_lost" not in hosts.broker.log


def test_a_cut_at_the_worst_moments(hosts: Hosts) -> None:
    """Short ones, again and again, while packets are lost and late, too."""
    network = hosts.network
    network.delay_ms, network.jitter_ms, network.loss = 5, 5, 0.01
    answer = hosts.ask("stuttering")
    for round_ in range(1, 7):
        answer.reaches(20 * round_)
        host = (hosts.worker_host, hosts.client_host)[round_ % 2]
        cut_for(network, host, packets=4)
    assert answer.end() == hosts.expected


def cut_for(network: Network, host: Host, packets: int) -> None:
    """Until so many packets were lost."""
    enough = network.lost + packets
    network.cut(host)
    until(lambda: network.lost >= enough, "packets are lost")
    network.heal(host)


def test_a_client_without_a_way_to_the_broker_is_told_so_within_its_deadline(hosts: Hosts) -> None:
    hosts.network.cut(hosts.client_host)
    assert hosts.ask("unreachable").end() == {"error": "no_broker"}
