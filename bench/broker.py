"""How many token messages a second go through the broker, and how long one takes.

    python bench/broker.py [--messages 60000] [--seconds 5] [--json]

Three processes: the broker, an echo worker, and this one as the client. Nothing computes, so the
numbers are the broker's own cost. Latency is one way, worker to client, at 1,000 messages a
second; the same path without a broker in between is measured in the same run, and the difference
is what the broker adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from vram_conductor.protocol import codec, limits, sockets
from vram_conductor.protocol.commands import Ready, Run, RunDone, RunTokens, WorkerWelcome
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import (
    Decode,
    Done,
    Error,
    Hello,
    Ok,
    Ping,
    Pong,
    Register,
    Tokens,
)
from vram_conductor.protocol.values import ConversationKey

ECHO = Path(__file__).with_name("echo_worker.py")
WAIT_MS = 20_000
LATENCY_RATE = 1_000
JOBS = 8
TARGET_PER_S = 10_000
TARGET_ADDED_P99_MS = 2.0


@dataclass(frozen=True)
class Latency:
    """One-way times in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float

    @staticmethod
    def of(times_ns: list[int]) -> Latency:
        ordered = sorted(times_ns)
        at = (len(ordered) // 2, min(len(ordered) - 1, len(ordered) * 99 // 100), -1)
        return Latency(*(round(ordered[index] / 1e6, 3) for index in at))


class Client:
    """A raw client: no library in between that would be measured, too."""

    def __init__(self, context: zmq.Context[sockets.Socket], endpoint: str) -> None:
        self.socket = sockets.connect(context, endpoint, hwm=100_000)
        if not self.socket.poll(WAIT_MS, zmq.POLLOUT):
            raise SystemExit(f"no broker at {endpoint}")
        self.heard_s = time.monotonic()
        self.ping_at_s = self.heard_s + 1.0
        self.send(Hello(v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR), client="bench"))
        self.receive()

    def send(self, message: Any) -> None:
        self.socket.send_multipart(codec.CLIENT_TO_BROKER.encode(message))

    def receive(self) -> Any:
        """The next message; says every second that we are alive."""
        while True:
            now_s = time.monotonic()
            if now_s > self.ping_at_s:
                self.ping_at_s = now_s + 1.0
                self.send(Ping())
            if not self.socket.poll(1_000):
                if time.monotonic() > self.heard_s + WAIT_MS / 1000:
                    raise SystemExit("the broker is silent")
                continue
            self.heard_s = time.monotonic()
            message = codec.BROKER_TO_CLIENT.decode(self.socket.recv_multipart())[0]
            if not isinstance(message, Pong):
                return message

    def register(self, agent: str, device: str) -> None:
        self.send(Register(rid=new_rid(), agent=agent, model="echo", n_ctx=1024, device=device))
        answer = self.receive()
        while not isinstance(answer, Ok):
            if isinstance(answer, Error):
                raise SystemExit(f"REGISTER failed: {answer.error.message}")
            answer = self.receive()

    def decode(self, agent: str, pieces: int) -> None:
        self.send(Decode(rid=new_rid(), agent=agent, tokens=[1], max_tokens=pieces))


@contextmanager
def process(*command: str, **how: Any) -> Generator[subprocess.Popen[Any]]:
    """A child that is gone afterwards."""
    child = subprocess.Popen([sys.executable, *command], **how)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def cpu_s(pid: int) -> float:
    """Processor time of a process, both modes, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(client: Client, messages: int, broker_pid: int) -> dict[str, float]:
    """Eight jobs at once, as fast as the worker can; counted at the client."""
    before_s = cpu_s(broker_pid)
    for number in range(JOBS):
        client.decode(f"fast{number}", messages // JOBS)
    tokens, done, first_s = 0, 0, 0.0
    while done < JOBS:
        message = client.receive()
        if isinstance(message, Tokens):
            first_s = first_s or time.perf_counter()
            tokens += 1
        elif isinstance(message, Done):
            done += 1
        elif isinstance(message, Error):
            raise SystemExit(f"DECODE failed: {message.error.message}")
    seconds = time.perf_counter() - first_s
    cpu = cpu_s(broker_pid) - before_s
    return {
        "messages": tokens,
        "messages_per_s": round(tokens / seconds),
        "broker_cpu_us_per_message": round(cpu / tokens * 1e6, 1),
    }


def latency(client: Client, seconds: float) -> Latency:
    """One job at the fixed rate, through the broker."""
    client.decode("slow", int(LATENCY_RATE * seconds))
    times_ns: list[int] = []
    while not isinstance(message := client.receive(), Done):
        if isinstance(message, Tokens):
            times_ns.append(time.monotonic_ns() - int(message.text))
    return Latency.of(times_ns)


def direct(context: zmq.Context[sockets.Socket], folder: Path, seconds: float) -> Latency:
    """The same worker on the same kind of socket, with nothing in between."""
    listener = sockets.listen(context, f"ipc://{folder}/direct.ipc")
    times_ns: list[int] = []
    command = [str(ECHO), "--workers", listener.endpoint, "--rate", str(LATENCY_RATE)]
    with process(*command):
        done = False
        while not done and listener.socket.poll(WAIT_MS):
            received = sockets.receive(listener.socket)
            assert received is not None
            now_ns = time.monotonic_ns()
            message, _ = codec.WORKER_TO_BROKER.decode(received.frames)
            if isinstance(message, RunTokens):
                times_ns.append(now_ns - int(message.text))
            elif isinstance(message, Ready):
                for command_out in _welcome_and_run(int(LATENCY_RATE * seconds)):
                    frames = codec.BROKER_TO_WORKER.encode(command_out)
                    sockets.send(listener.socket, frames, received.peer)
            done = isinstance(message, RunDone)
    listener.close()
    return Latency.of(times_ns)


def _welcome_and_run(pieces: int) -> list[Any]:
    version = (limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR)
    return [
        WorkerWelcome(v=version, broker_epoch=1, heartbeat_ms=2_000),
        Run(
            broker_epoch=1,
            op=1,
            job=1,
            conversation=ConversationKey("local", "a", "main"),
            version=0,
            transcript_tokens=0,
            tokens=[1],
            max_tokens=pieces,
        ),
    ]


def measure(messages: int, seconds: float) -> dict[str, Any]:
    """Everything, in one run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vcb")))
        context: zmq.Context[sockets.Socket] = zmq.Context()
        stack.callback(context.destroy, 0)
        flags = ["--runtime-dir", f"{folder}/r", "--state-dir", f"{folder}/s", "--print-endpoints"]
        flags += ["--log-level", "warning"]
        broker = stack.enter_context(
            process("-m", "vram_conductor.broker", *flags, stdout=subprocess.PIPE)
        )
        assert broker.stdout is not None
        endpoints = json.loads(broker.stdout.readline())
        worker = [str(ECHO), "--workers", endpoints["workers"]]
        stack.enter_context(process(*worker, "--device", "cpu:0"))
        stack.enter_context(process(*worker, "--device", "cpu:1", "--rate", str(LATENCY_RATE)))
        client = Client(context, endpoints["clients"])
        _register_when_ready(client)
        latency(client, 0.5)  # warm-up
        through = latency(client, seconds)
        result: dict[str, Any] = throughput(client, messages, broker.pid)
        without = direct(context, folder, seconds)
    result["through_ms"] = through.__dict__
    result["direct_ms"] = without.__dict__
    result["added_p50_ms"] = round(through.p50_ms - without.p50_ms, 3)
    result["added_p99_ms"] = round(through.p99_ms - without.p99_ms, 3)
    result["ok"] = (
        result["messages_per_s"] >= TARGET_PER_S and result["added_p99_ms"] <= TARGET_ADDED_P99_MS
    )
    return result


def _register_when_ready(client: Client) -> None:
    """REGISTER waits for nobody: ask again until both workers are there."""
    give_up_s = time.monotonic() + WAIT_MS / 1000
    while True:
        try:
            client.register("slow", "cpu:1")
            for number in range(JOBS):
                client.register(f"fast{number}", "cpu:0")
        except SystemExit:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)
        else:
            return


def table(result: dict[str, Any]) -> str:
    """For a person."""
    through, without = result["through_ms"], result["direct_ms"]
    rows = [
        ("token messages through the broker", f"{result['messages_per_s']:,} /s"),
        ("broker CPU per message", f"{result['broker_cpu_us_per_message']} µs"),
    ]
    for name in ("p50", "p99", "max"):
        both = f"{through[f'{name}_ms']}, {without[f'{name}_ms']} ms"
        rows.append((f"latency {name} at 1,000/s: through, direct", both))
    rows.append(("added by the broker, p99", f"{result['added_p99_ms']} ms"))
    return "\n".join(f"{name:<42} {value:>20}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="The broker's own cost per token message.")
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each latency measurement")
    parser.add_argument("--json", action="store_true", help="only the JSON")
    given = parser.parse_args()
    result = measure(given.messages, given.seconds)
    print(json.dumps(result))
    if not given.json:
        print(table(result))
        print(f"targets: >= {TARGET_PER_S:,}/s, added p99 <= {TARGET_ADDED_P99_MS} ms")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
