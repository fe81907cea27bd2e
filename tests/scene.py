"""A running Stage with a client on it, as the end-to-end tests see it: books, processes, tokens."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest
import zmq
from broker_process import RawClient
from gguf_models import CHATML, Spec, make_model

from vram_conductor.client import Conductor
from vram_conductor.client.demo_outside import wait_dead
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.stage import Stage, StageDevice
from vram_conductor.protocol import sockets
from vram_conductor.protocol.errors import ConductorError, ErrorInfo
from vram_conductor.protocol.status import AgentStatus, DeviceStatus
from vram_conductor.protocol.values import Line

WAIT_S = 120.0
"""Shared machines are slow now and then: a deadline only has to be an end."""

MIB = 1 << 20
SMOL = "smollm2-135m"
PLAIN = Spec(vocab="bytes", n_ctx_train=16_384)
CHATTY = Spec(vocab="bytes", chat_template=CHATML, seed=2)
NO_END = {0: -1000.0, 2: -1000.0, 4: -1000.0}
"""Forbids the end tokens (the tiny models' and SmolLM2's), for answers of a known length."""

T = TypeVar("T")


def model(spec: Spec = PLAIN) -> str:
    """Path of a tiny model, for REGISTER."""
    return str(make_model(spec))


def some_tokens(count: int, seed: int, n_vocab: int = 320) -> list[int]:
    """Token ids that no model of the tests treats as special."""
    draw = random.Random(seed)
    return [
        draw.randrange(270, n_vocab) if n_vocab <= 320 else draw.randrange(1000, 40_000)
        for _ in range(count)
    ]


def until(look: Callable[[], T], what: str, wait_s: float = WAIT_S) -> T:
    """Poll until ``look`` gives something true; that is returned."""
    give_up_s = time.monotonic() + wait_s
    while not (found := look()):
        assert time.monotonic() < give_up_s, f"it never happened: {what}"
        threading.Event().wait(0.01)
    return found


def refusal(call: Callable[[], object]) -> ErrorInfo:
    """The error that ``call`` ends with; it says something a person can act on."""
    with pytest.raises(ConductorError) as caught:
        call()
    info = caught.value.info
    assert len(info.message) > 15, info
    return info


@dataclass(frozen=True)
class Books:
    """What a refused request must leave as it was."""

    promised: list[Line]
    host: list[Line]
    resident: list[tuple[str, int]]
    agents: list[tuple[str, str]]


def _owned(device: DeviceStatus, lines: list[Line]) -> list[Line]:
    """On a GPU the base follows the device: it grows with the first use of some kernels."""
    return [line for line in lines if line.key != "base" or device.kind == "cpu"]


class Scene:
    """A Stage that runs, with a client.

    Attributes:
        stage, conductor: the system and the client.
    """

    def __init__(self, *devices: StageDevice, worker: str = "", broker: str = "") -> None:
        self._stack = ExitStack()
        self.news: list[str] = []
        self.stage = Stage(
            devices or (StageDevice(),), worker=worker, broker=broker, say=self.news.append
        )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.stage)
            self.conductor = stack.enter_context(Conductor(self.stage.endpoint, client="test"))
            # Before its worker's first report nobody knows what is on a device.
            until(self._reported, "every worker has said what is on its device")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            log = self.stage.log.read_text(errors="replace")
            sys.stderr.write("\n".join([*self.news, log[-20_000:]]))
        self._stack.close()

    def _reported(self) -> bool:
        return all(device.resident for device in self.conductor.status().devices)

    # --- looking ------------------------------------------------------------------------------

    def device(self, name: str = "cpu") -> DeviceStatus:
        """A device of STATUS."""
        return next(item for item in self.conductor.status().devices if item.device == name)

    def agent(self, name: str) -> AgentStatus:
        """An agent of LIST."""
        return next(item for item in self.conductor.list() if item.agent == name)

    def books(self) -> Books:
        """The ledgers, what is on the devices, and the agents."""
        report = self.conductor.status()
        return Books(
            [x for device in report.devices for x in _owned(device, device.promised.lines)],
            [line for device in report.devices for line in device.host.lines],
            [
                (line.key, line.bytes)
                for device in report.devices
                for line in _owned(device, device.resident)
            ],
            [(agent.agent, agent.state) for agent in report.agents],
        )

    def calm_books(self) -> Books:
        """The books once all that is promised is resident and nothing else (where all fits):
        what is resident is reported with a delay."""

        def calm() -> Books | None:
            books = self.books()
            promised = {(line.key, line.bytes) for line in books.promised if line.bytes}
            resident = {(key, size) for key, size in books.resident if size}
            return books if promised == resident else None

        found = until(calm, "promised and resident agree")
        assert found is not None
        return found

    def settled(self, books: Books) -> None:
        """Wait until the books are these again."""
        until(lambda: self.books() == books, f"the books are as before: {books}")

    def arenas(self, agent: str) -> list[Path]:
        """The files that hold parked states of an agent."""
        found = [path for path in self.stage.arena_dir.rglob("*") if path.is_file()]
        return [path for path in found if agent.encode() in path.read_bytes()[:12288]]

    def sealed(self, agent: str) -> None:
        """Wait until what is parked of the agent has its checksums (layout: the worker's
        ``arena_format``): only then will another process take it up."""

        def all_sealed() -> bool:
            words = [struct.unpack_from("=12Q", path.read_bytes()) for path in self.arenas(agent)]
            return bool(words) and all(word[4] >> 1 in (word[8], word[10]) for word in words)

        until(all_sealed, f"the checkpoints of {agent} are complete")

    # --- doing --------------------------------------------------------------------------------

    def start(self, agent: str, tokens: Sequence[int] | str, **options: Any) -> Reply:
        """A greedy job that appends: token ids, or text. It ends at ``max_tokens`` only."""
        inputs: dict[str, Any] = (
            {"prompt": tokens} if isinstance(tokens, str) else {"tokens": list(tokens)}
        )
        inputs |= {"continue_": True, "temperature": 0, "return_ids": True, "logit_bias": NO_END}
        return self.conductor.decode(agent, **{**inputs, **options})

    def run(self, agent: str, tokens: Sequence[int] | str, **options: Any) -> Result:
        """The same, to its end."""
        return self.start(agent, tokens, **options).result(WAIT_S)

    def raw(self, *, hello: bool = True) -> RawClient:
        """A client without our library, closed with the scene."""
        context: zmq.Context[sockets.Socket] = zmq.Context()
        self._stack.callback(context.term)
        client = RawClient(sockets.connect(context, self.stage.endpoint))
        self._stack.callback(client.socket.close, 0)
        assert client.socket.poll(30_000, zmq.POLLOUT)
        if hello:
            client.hello()
        return client

    # --- processes ----------------------------------------------------------------------------

    def broker_pid(self) -> int:
        process = self.stage.supervisor.children[0].process
        assert process is not None
        return process.pid

    def worker_pid(self, device: str = "cpu") -> int:
        """The worker that serves now; waits until there is one."""
        found = until(lambda: self.device(device).worker, "there is a worker")
        assert found is not None
        return found.pid

    def kill_broker(self) -> int:
        """kill -9; the pid that it had."""
        return _kill(self.broker_pid())

    def kill_worker(self, device: str = "cpu") -> int:
        """kill -9; the pid that it had."""
        return _kill(self.worker_pid(device))

    # --- others -------------------------------------------------------------------------------

    @contextmanager
    def tidied(self) -> Generator[Scene]:
        """What is registered inside is unregistered at the end, and the books are as before."""
        before = self.calm_books()
        yield self
        for agent in self.conductor.list():
            if (agent.agent, agent.state) not in before.agents:
                self.conductor.unregister(agent.agent)
        self.settled(before)

    @contextmanager
    def undisturbed(self) -> Generator[None]:
        """Around bad input: another agent's conversation, in the middle of an answer, goes on
        with the very tokens that it would have had, and the books are as before."""
        name = f"talk-{next(_numbers)}"
        self.run(BYSTANDER, HISTORY, conversation=name, max_tokens=4)
        before = self.calm_books()
        reply = self.start(BYSTANDER, MORE, conversation=name, max_tokens=120)
        next(reply)
        yield
        found = reply.result(WAIT_S)
        last = self.run(BYSTANDER, MORE, conversation=name, max_tokens=8)
        assert [found.ids, last.ids] == self.reference()
        assert last.usage.reprefilled_tokens == 0
        self.settled(before)
        self.conductor.reset(BYSTANDER, name)

    def reference(self) -> list[list[int]]:
        """What the bystander says when nothing else happens."""
        if not hasattr(self, "_reference"):
            turns = [(HISTORY, 4), (MORE, 120), (MORE, 8)]
            talk = [
                self.run(BYSTANDER, ids, conversation="reference", max_tokens=count).ids
                for ids, count in turns
            ]
            assert len(set(talk[1])) > 10, "a model that repeats itself proves nothing"
            self._reference = talk[1:]
        return self._reference


BYSTANDER = "bystander"
HISTORY, MORE = some_tokens(20, 1), some_tokens(3, 2)
_numbers = itertools.count()


def with_bystander(scene: Scene) -> Scene:
    """Admit the bystander and hear what it says undisturbed."""
    scene.conductor.register(BYSTANDER, model(), n_ctx=1024, temperature=0)
    scene.reference()
    return scene


def _kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    assert wait_dead(pid, WAIT_S)
    return pid
