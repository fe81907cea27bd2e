"""Sockets: safe binding, ownership of ipc paths, non-blocking send, capped receive."""

import os
import signal
import socket as system_socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from vram_conductor.protocol import codec, limits, sockets
from vram_conductor.protocol.errors import (
    ConductorError,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from vram_conductor.protocol.messages import Ping
from vram_conductor.protocol.sockets import Listener, SendResult, Socket

DEADLINE_MS = 20_000


@pytest.fixture
def folder(short_tmp: Path) -> Path:
    """A folder that does not exist yet."""
    return short_tmp / "run"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, the context last."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def context(stack: ExitStack) -> sockets.Context:
    made: sockets.Context = zmq.Context()
    stack.callback(made.destroy, linger=0)
    return made


def listen(context: sockets.Context, stack: ExitStack, endpoint: str, hwm: int = 100) -> Listener:
    listener = sockets.listen(context, endpoint, hwm=hwm)
    stack.callback(listener.close)
    return listener


def connect(context: sockets.Context, stack: ExitStack, endpoint: str, hwm: int = 100) -> Socket:
    socket = sockets.connect(context, endpoint, hwm=hwm)
    stack.callback(socket.close)
    return socket


def receive(socket: Socket) -> sockets.Received:
    assert socket.poll(DEADLINE_MS), "nothing arrived"
    received = sockets.receive(socket)
    assert received is not None
    return received


def say(socket: Socket, frames: list[bytes]) -> None:
    assert socket.poll(DEADLINE_MS, zmq.POLLOUT), "not connected"
    assert sockets.send(socket, frames) is SendResult.SENT


@pytest.mark.parametrize("kind", ["tcp", "ipc", "inproc"])
def test_there_and_back(
    context: sockets.Context, stack: ExitStack, folder: Path, kind: str
) -> None:
    endpoint = {"tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{folder}/c.ipc", "inproc": "inproc://c"}
    listener = listen(context, stack, endpoint[kind])
    client = connect(context, stack, listener.endpoint)
    say(client, [b"a", b"", b"c"])
    received = receive(listener.socket)
    assert received.frames == [b"a", b"", b"c"]
    assert sockets.send(listener.socket, [b"x"], received.peer) is SendResult.SENT
    assert receive(client) == (b"", [b"x"])
    assert sockets.receive(client) is None
    assert sockets.receive(listener.socket) is None


def test_port_0_becomes_a_real_endpoint(context: sockets.Context, stack: ExitStack) -> None:
    listener = listen(context, stack, "tcp://localhost:*")
    host, _, port = listener.endpoint.rpartition(":")
    assert host == "tcp://127.0.0.1"
    assert int(port) > 0


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5555", "tcp://gpu-box:5555"]
)
def test_tcp_beyond_loopback_is_refused_without_keys(
    context: sockets.Context, endpoint: str
) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        sockets.listen(context, endpoint)
    assert caught.value.reason == "auth_required"
    assert "127.0.0.1" in caught.value.info.message


def test_port_in_use(context: sockets.Context, stack: ExitStack) -> None:
    listener = listen(context, stack, "tcp://127.0.0.1:0")
    with pytest.raises(FailedPrecondition) as caught:
        sockets.listen(context, listener.endpoint)
    assert caught.value.reason == "endpoint_in_use"
    assert caught.value.details["endpoint"] == listener.endpoint


def test_an_address_that_is_not_ours_is_a_typed_error(
    context: sockets.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram_conductor.protocol.endpoints.Tcp.loopback", True)
    with pytest.raises(Unavailable) as caught:
        sockets.listen(context, "tcp://192.0.2.1:5555")
    assert caught.value.reason == "bind_failed"


@pytest.mark.parametrize("text", ["nonsense", "ipc://@abstract", "ipc:///" + "x" * 200])
def test_bad_endpoints_are_refused_on_both_sides(context: sockets.Context, text: str) -> None:
    for call in (sockets.listen, sockets.connect):
        with pytest.raises(InvalidArgument):
            call(context, text)


# --- ipc ---


def test_the_ipc_folder_is_private(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    listen(context, stack, f"ipc://{folder}/deep/c.ipc")
    assert stat.S_IMODE((folder / "deep").stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "deep" / "c.ipc").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "deep" / "c.ipc.lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o701])
def test_a_folder_open_to_others_is_refused(
    context: sockets.Context, folder: Path, mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FailedPrecondition) as caught:
        sockets.listen(context, f"ipc://{folder}/c.ipc")
    assert caught.value.reason == "unsafe_directory"
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == mode, "it is not ours to repair"


def test_a_folder_that_is_a_link_is_refused(context: sockets.Context, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "link").symlink_to(folder)
    with pytest.raises(FailedPrecondition) as caught:
        sockets.listen(context, f"ipc://{folder}/link/c.ipc")
    assert caught.value.reason == "unsafe_directory"


def test_a_lock_that_is_a_link_is_not_followed(context: sockets.Context, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    victim = folder / "victim"
    victim.write_text("precious")
    (folder / "c.ipc.lock").symlink_to(victim)
    with pytest.raises(Unavailable):
        sockets.listen(context, f"ipc://{folder}/c.ipc")
    assert victim.read_text() == "precious"


def test_a_file_in_the_way_is_not_deleted(context: sockets.Context, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "c.ipc").write_text("precious")
    with pytest.raises(FailedPrecondition) as caught:
        sockets.listen(context, f"ipc://{folder}/c.ipc")
    assert caught.value.reason == "path_occupied"
    assert (folder / "c.ipc").read_text() == "precious"


def test_a_folder_that_cannot_be_made(context: sockets.Context, folder: Path) -> None:
    folder.parent.joinpath("file").write_text("")
    with pytest.raises(ConductorError) as caught:
        sockets.listen(context, f"ipc://{folder.parent}/file/sub/c.ipc")
    assert caught.value.reason == "bind_failed"


def test_a_second_broker_on_the_path_is_told_who_holds_it(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    listener = listen(context, stack, f"ipc://{folder}/c.ipc")
    with pytest.raises(FailedPrecondition) as caught:
        sockets.listen(context, listener.endpoint)
    assert caught.value.reason == "endpoint_in_use"
    assert caught.value.details["pid"] == os.getpid()
    assert str(os.getpid()) in caught.value.info.message
    # The first one is not disturbed.
    client = connect(context, stack, listener.endpoint)
    say(client, [b"still here"])
    assert receive(listener.socket).frames == [b"still here"]


HOLDER = """
import sys, time, zmq
from vram_conductor.protocol import sockets
listener = sockets.listen(zmq.Context(), sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_broker_leaves_the_path_free(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    endpoint = f"ipc://{folder}/c.ipc"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(FailedPrecondition) as caught:
            sockets.listen(context, endpoint)
        assert caught.value.details["pid"] == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (folder / "c.ipc").exists(), "a stale socket file is what this test is about"
    listener = listen(context, stack, endpoint)
    client = connect(context, stack, endpoint)
    say(client, [b"hello"])
    assert receive(listener.socket).frames == [b"hello"]


def test_a_successor_keeps_its_socket_file(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    """libzmq would unlink the path in a thread, after the next broker has bound it."""
    endpoint = f"ipc://{folder}/c.ipc"
    listener = sockets.listen(context, endpoint)
    client = connect(context, stack, endpoint)
    for _ in range(30):
        listener.close()
        listener.close()
        listener = sockets.listen(context, endpoint)
    stack.callback(listener.close)
    late = connect(context, stack, endpoint)
    say(late, [b"late"])
    assert receive(listener.socket).frames == [b"late"]
    say(client, [b"reconnected"])
    assert receive(listener.socket).frames == [b"reconnected"]


def test_closing_removes_the_socket_and_keeps_the_lock_file(
    context: sockets.Context, folder: Path
) -> None:
    listener = sockets.listen(context, f"ipc://{folder}/c.ipc")
    listener.close()
    assert [path.name for path in folder.iterdir()] == ["c.ipc.lock"]


# --- sending and receiving ---


def test_an_unknown_peer_is_gone(context: sockets.Context, stack: ExitStack) -> None:
    listener = listen(context, stack, "inproc://c")
    assert sockets.send(listener.socket, [b"x"], b"nobody") is SendResult.GONE


def test_a_peer_that_left_is_gone(context: sockets.Context, stack: ExitStack, folder: Path) -> None:
    listener = listen(context, stack, f"ipc://{folder}/c.ipc")
    client = sockets.connect(context, listener.endpoint)
    say(client, [b"hello"])
    peer = receive(listener.socket).peer
    client.close()
    results: set[SendResult] = set()
    for _ in range(1000):
        results.add(sockets.send(listener.socket, [b"x"], peer))
        if SendResult.GONE in results:
            break
        listener.socket.poll(10)
    assert SendResult.GONE in results


def test_a_slow_peer_is_full_and_others_are_not(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    listener = listen(context, stack, f"ipc://{folder}/c.ipc", hwm=10)
    slow, fast = (connect(context, stack, listener.endpoint, hwm=10) for _ in range(2))
    peers: list[bytes] = []
    for client in (slow, fast):
        say(client, [b"hello"])
        peers.append(receive(listener.socket).peer)
    big = [b"x" * 100_000]
    for _ in range(10_000):
        if sockets.send(listener.socket, big, peers[0]) is SendResult.FULL:
            break
    else:
        raise AssertionError("a queue without end")
    assert sockets.send(listener.socket, big, peers[1]) is SendResult.SENT
    assert receive(fast).frames == big


def test_the_broker_may_come_later(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    client = connect(context, stack, f"ipc://{folder}/c.ipc")
    assert sockets.send(client, [b"early"]) is SendResult.SENT
    listener = listen(context, stack, f"ipc://{folder}/c.ipc")
    assert receive(listener.socket).frames == [b"early"]


_BROKEN_CONNECTION = """
import sys, time, zmq
from vram_conductor.protocol import sockets
context = zmq.Context()
listener = sockets.listen(context, sys.argv[1])
client = sockets.connect(context, sys.argv[1])
monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
assert client.poll(10_000, zmq.POLLOUT)
sockets.send(client, [b"hello"])
assert listener.socket.poll(10_000)
peer = sockets.receive(listener.socket).peer
for number in range(200):
    # An odd and an even number of frames each: every 100th of them is a second one somewhere.
    frames = [b"one", b"two"] if number < 100 else [b"one", b"two", b"three"]
    assert sockets.send(listener.socket, frames, peer) is sockets.SendResult.SENT
listener.close()
assert monitor.poll(10_000), "the connection is gone, and the client has read nothing yet"
count, until = 0, time.monotonic() + 10
while count < 200 and time.monotonic() < until:
    count += sockets.receive(client) is not None
print(count)
client.disable_monitor()
context.destroy(linger=0)
"""


def test_a_connection_that_breaks_harms_nobody_who_is_reading(folder: Path) -> None:
    """Nothing that had arrived is lost. In a process of its own: libzmq may abort it."""
    command = [sys.executable, "-c", _BROKEN_CONNECTION, f"ipc://{folder}/c.ipc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr


def test_surplus_frames_are_dropped_and_refused(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    listener = listen(context, stack, f"ipc://{folder}/c.ipc")
    client = connect(context, stack, listener.endpoint)
    say(client, [limits.PREAMBLE] * 50_000)
    received = receive(listener.socket)
    assert len(received.frames) == limits.FRAMES_MAX + 1
    with pytest.raises(InvalidArgument) as caught:
        codec.CLIENT_TO_BROKER.decode(received.frames)
    assert caught.value.reason == "bad_frames"
    say(client, codec.CLIENT_TO_BROKER.encode(Ping(n=7)))
    assert codec.CLIENT_TO_BROKER.decode(receive(listener.socket).frames) == (Ping(n=7), [])
    # The connecting side is capped in the same way.
    sockets.send(listener.socket, [b"y"] * 100, received.peer)
    assert len(receive(client).frames) == limits.FRAMES_MAX + 1


def test_a_giant_frame_costs_its_sender_the_connection_and_nobody_else(
    context: sockets.Context, stack: ExitStack, folder: Path
) -> None:
    listener = listen(context, stack, f"ipc://{folder}/c.ipc")
    rude, polite = (connect(context, stack, listener.endpoint) for _ in range(2))
    say(rude, [b"x" * (limits.FRAME_BYTES_MAX + 1)])
    say(polite, [b"y" * limits.FRAME_BYTES_MAX])
    assert receive(listener.socket).frames == [b"y" * limits.FRAME_BYTES_MAX]
    assert sockets.receive(listener.socket) is None
    # The rude one may come back with something decent.
    say(rude, [b"sorry"])
    assert receive(listener.socket).frames == [b"sorry"]


def test_plain_bytes_on_the_port_are_harmless(context: sockets.Context, stack: ExitStack) -> None:
    listener = listen(context, stack, "tcp://127.0.0.1:0")
    port = int(listener.endpoint.rpartition(":")[2])
    with system_socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        client = connect(context, stack, listener.endpoint)
        say(client, [b"hello"])
        assert receive(listener.socket).frames == [b"hello"]


def test_options_of_both_kinds(context: sockets.Context, stack: ExitStack) -> None:
    listener = listen(context, stack, "inproc://c")
    client = connect(context, stack, "inproc://c")
    for socket in (listener.socket, client):
        assert socket.getsockopt(zmq.MAXMSGSIZE) == limits.FRAME_BYTES_MAX
        assert socket.getsockopt(zmq.LINGER) == sockets.LINGER_MS
        assert socket.getsockopt(zmq.IPV6) == 0
        assert socket.getsockopt(zmq.SNDHWM) == 100
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == sockets.ZMTP_HEARTBEAT_MS
        assert socket.getsockopt(zmq.ROUTING_ID) == b"", "equal ids steal or mute"
    assert client.getsockopt(zmq.IMMEDIATE) == 0
