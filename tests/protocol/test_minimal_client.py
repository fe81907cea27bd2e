"""The smallest client, as its own process, against a broker of a few lines."""

import ast
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from vram_conductor.protocol import sockets
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.codec import BROKER_TO_CLIENT, CLIENT_TO_BROKER
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.messages import (
    Accepted,
    Bye,
    ClientMessage,
    Decode,
    Done,
    Error,
    Hello,
    Ok,
    Ping,
    Pong,
    Progress,
    Register,
    Tokens,
    Welcome,
)
from vram_conductor.protocol.validate import check
from vram_conductor.protocol.values import Usage

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "minimal_client.py"
PIECES = ["The ", "sea ", "is 🌊", "."]


def answers(message: ClientMessage) -> list[Base]:
    """What a broker says that knows one model."""
    match message:
        case Hello():
            return [
                Welcome(v=(1, 0), session="s", broker_epoch=1, principal="local", heartbeat_ms=2000)
            ]
        case Register(model="smollm2-135m"):
            return [Progress(rid=message.rid, stage="load"), Ok(rid=message.rid)]
        case Register():
            error = ErrorInfo(Code.NOT_FOUND, "no_such_model", "pull it first")
            return [Error(rid=message.rid, error=error)]
        case Decode():
            rid = message.rid
            pieces: list[Base] = [
                Tokens(rid=rid, seq=seq, text=text) for seq, text in enumerate(PIECES)
            ]
            done = Done(rid=rid, seq=len(PIECES), usage=Usage(generated_tokens=4))
            return [Accepted(rid=rid, job=1, position=0), *pieces, done]
        case Ping():
            return [Pong(n=message.n)]
        case _:
            return []


@contextmanager
def broker(folder: Path) -> Generator[tuple[str, list[ClientMessage]]]:
    """Its endpoint, and what it has heard."""
    context: sockets.Context = zmq.Context()
    listener = sockets.listen(context, f"ipc://{folder}/run/c.ipc")
    heard: list[ClientMessage] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not listener.socket.poll(20):
                continue
            received = sockets.receive(listener.socket)
            assert received is not None
            message, _ = CLIENT_TO_BROKER.decode(received.frames)
            check(message)
            heard.append(message)
            for answer in answers(message):
                sockets.send(listener.socket, BROKER_TO_CLIENT.encode(answer), received.peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.endpoint, heard
    finally:
        stop.set()
        thread.join()
        listener.close()
        context.term()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CLIENT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_prints_the_stream_and_leaves(short_tmp: Path) -> None:
    with broker(short_tmp) as (endpoint, heard):
        done = run(endpoint)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("".join(PIECES) + "\n")
        kinds = [type(message) for message in heard if not isinstance(message, Ping)]
    assert kinds[:3] == [Hello, Register, Decode]
    assert set(kinds[3:]) <= {Bye}


def test_an_error_is_its_message_and_exit_code_1(short_tmp: Path) -> None:
    with broker(short_tmp) as (endpoint, _):
        done = run(endpoint, "another-model")
    assert done.returncode == 1
    assert done.stderr == "no_such_model: pull it first\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_an_endpoint_it_says_how_it_is_called(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert "python examples/minimal_client.py ENDPOINT [MODEL]" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_small_and_needs_pyzmq_and_msgpack_only() -> None:
    text = CLIENT.read_text("utf-8")
    assert text.count("\n") <= 60
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - sys.stdlib_module_names == {"zmq", "msgpack"}
