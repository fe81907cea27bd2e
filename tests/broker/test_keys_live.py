"""Keys on real sockets over loopback: who is let in, as whom, how far, and for how long."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from broker_process import BrokerProcess, until
from keyed_broker import ANY_PORT, KeyedBroker, Keys, until_in

from vram_conductor.client import AsyncConductor, Conductor
from vram_conductor.protocol import codec, limits, sockets
from vram_conductor.protocol.commands import Ready, ToWorker, WorkerRefused, WorkerWelcome
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from vram_conductor.protocol.key_files import load_key, new_pair
from vram_conductor.protocol.keys import KeyFile
from vram_conductor.protocol.messages import Error, Hello, Welcome
from vram_conductor.protocol.values import DeviceInfo, Memory
from vram_conductor.worker.inbound import Inbound, Refused
from vram_conductor.worker.link import Link

MIB = 1 << 20
QUICK_S = 10.0
"""A refusal that libzmq tells of waits for no deadline (30 s); the machine may be busy."""


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[KeyedBroker]:
    process = KeyedBroker(short_tmp)
    with process:
        yield process


def tokens(client: Conductor, agent: str = "coder", pieces: int = 4) -> int:
    """Decode; how many pieces came."""
    reply = client.decode(agent, tokens=[1, 2, 3], max_tokens=pieces, return_ids=True)
    return reply.result().usage.generated_tokens


# --- the right key ----------------------------------------------------------------------------


def test_a_key_stands_for_its_principal_whatever_the_client_says(broker: KeyedBroker) -> None:
    broker.keyed_echo()
    alice = until_in(broker, broker.keys.new("laptop", principal="alice"))
    with alice:
        alice.register("coder", "echo", n_ctx=1024)
        assert tokens(alice) == 4
        (agent,) = alice.list()
        assert agent.principal == "alice"
    key = load_key(broker.folder / "laptop.key")
    socket = sockets.connect(broker.context, broker.endpoints["clients"], key=key)
    broker.stack.callback(socket.close, 0)
    hello = Hello(v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR), client="admin")
    socket.send_multipart(codec.CLIENT_TO_BROKER.encode(hello))
    assert socket.poll(5_000)
    welcome = codec.BROKER_TO_CLIENT.decode(socket.recv_multipart())[0]
    assert isinstance(welcome, Welcome)
    assert welcome.principal == "alice"


def test_several_clients_of_one_process_and_asyncio(broker: KeyedBroker) -> None:
    broker.keyed_echo()
    key = broker.keys.new("alice")
    until_in(broker, key).register("coder", "echo", n_ctx=1024)

    async def ask() -> int:
        async with AsyncConductor(broker.endpoints["clients"], key=key) as client:
            reply = client.decode("coder", tokens=[1], max_tokens=3)
            return (await reply.result()).usage.generated_tokens

    assert asyncio.run(ask()) == 3


def test_the_environment_and_the_configuration_name_a_key(
    broker: KeyedBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = broker.keys.new("alice")
    until_in(broker, key).close()
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENT_KEY", str(key))
    with Conductor(broker.endpoints["clients"]) as client:
        assert client.ping() > 0
    monkeypatch.delenv("VRAM_CONDUCTOR_CLIENT_KEY")
    config = tmp_path / "client.toml"
    config.write_text(
        f'[broker]\nclients = "{broker.endpoints["clients"]}"\n[client]\nkey = "{key}"\n'
    )
    monkeypatch.setenv("VRAM_CONDUCTOR_CONFIG", str(config))
    with Conductor() as client:
        assert client.ping() > 0


def test_a_key_from_a_host_whose_clock_is_ahead_is_as_good(broker: KeyedBroker) -> None:
    key = broker.keys.new("alice", created="2999-12-31T23:59:59Z")
    assert until_in(broker, key).ping() > 0


# --- no key, or another one ---------------------------------------------------------------------


def test_an_unknown_key_is_refused_at_once(broker: KeyedBroker) -> None:
    error, took_s = broker.refusal(broker.keys.stranger("mallory"), 30.0)
    assert isinstance(error, Unauthenticated)
    assert error.reason == "key_refused"
    assert load_key(broker.folder / "mallory.key").public in str(error)
    assert took_s < QUICK_S
    until(lambda: "broker.key_refused" in broker.log, "it is logged")
    assert load_key(broker.folder / "mallory.key").secret not in broker.log


def test_without_a_key_the_client_is_told_that_it_needs_one(broker: KeyedBroker) -> None:
    error, took_s = broker.refusal(None, 30.0)
    assert isinstance(error, Unauthenticated)
    assert error.reason == "key_required"
    assert "conductor keys new" in str(error)
    assert took_s < QUICK_S


def test_a_revoked_key_is_refused_like_an_unknown_one(broker: KeyedBroker) -> None:
    path = broker.keys.new("alice")
    until_in(broker, path).close()
    seen = broker.log.count("broker.keys_changed")
    broker.keys.revoke("alice")
    until(lambda: broker.log.count("broker.keys_changed") > seen, "the broker has seen it")
    error, took_s = broker.refusal(path, 30.0)
    assert isinstance(error, Unauthenticated)
    assert error.reason == "key_refused"
    assert took_s < QUICK_S


def test_another_brokers_key_is_told_within_the_deadline(broker: KeyedBroker) -> None:
    """The broker cannot read a word of it, so it cannot say why it closes the connection; but that
    it does so again and again, and is there all the time, says enough."""
    path = broker.keys.stranger("lost", broker=new_pair().public)
    error, took_s = broker.refusal(path, 30.0)
    assert isinstance(error, Unauthenticated)
    assert error.reason == "wrong_broker_key"
    assert took_s < QUICK_S


def test_a_port_that_hangs_up_at_once_is_given_all_the_time_there_is(
    broker: KeyedBroker,
) -> None:
    """A tunnel whose far end is not up yet, for example."""
    import socket

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while not over.is_set():
                server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        broker.endpoints["clients"] = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        error, took_s = broker.refusal(broker.keys.new("alice"), 1.0)
        over.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()
    assert error.reason in ("wrong_broker_key", "no_broker")
    assert took_s >= 0.9


def test_a_key_for_a_broker_without_keys(short_tmp: Path) -> None:
    """Whoever answers there cannot prove that it is the broker."""
    with BrokerProcess(short_tmp, "--clients", ANY_PORT) as plain:
        path = Keys(short_tmp / "elsewhere").new("alice")
        with pytest.raises(FailedPrecondition) as caught:
            Conductor(plain.endpoints["clients"], key=path)
        assert caught.value.reason == "key_unwanted"


def test_asyncio_is_told_the_same(broker: KeyedBroker) -> None:
    async def enter(key: Path | str) -> str:
        client = AsyncConductor(broker.endpoints["clients"], key=key)
        with pytest.raises(Unauthenticated) as caught:
            await client.connect()
        return caught.value.reason

    assert asyncio.run(enter(broker.keys.stranger("mallory"))) == "key_refused"
    assert asyncio.run(enter("")) == "key_required"


def test_each_endpoint_takes_its_own_keys_only(broker: KeyedBroker) -> None:
    worker, owner = broker.keys.new("w", "worker"), broker.keys.new("alice")
    until_in(broker, owner)
    assert broker.refusal(worker)[0].reason == "key_refused"
    broker.endpoints["clients"] = broker.endpoints["workers"]
    for path in (owner, broker.keys.new("root", "admin")):
        assert broker.refusal(path)[0].reason == "key_refused"


def test_nobody_gets_a_session_by_choosing_its_routing_id(broker: KeyedBroker) -> None:
    """Bob waits for the id of a connection of alice's to become free, and speaks at once."""
    paths = [broker.keys.new(name) for name in ("alice", "bob")]
    alice, bob = [(until_in(broker, path), load_key(path))[1] for path in paths]
    hello = codec.CLIENT_TO_BROKER.encode(
        Hello(v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR), client="x")
    )

    def speak(key: KeyFile, routing_id: bytes) -> sockets.Socket:
        socket = sockets.connect(
            broker.context,
            broker.endpoints["clients"],
            key=key,
            prepare=lambda socket: socket.setsockopt(zmq.ROUTING_ID, routing_id),
        )
        broker.stack.callback(socket.close, 0)
        socket.send_multipart(hello)
        return socket

    chosen = speak(alice, b"x")
    assert chosen.poll(5_000)
    refusal = codec.BROKER_TO_CLIENT.decode(chosen.recv_multipart())[0]
    assert isinstance(refusal, Error)
    assert refusal.error.reason == "bad_frames"
    for number in range(8):
        routing_id = b"\0\0\0\0" + bytes([number])
        hers = speak(alice, routing_id)
        assert hers.poll(5_000)
        hers.close(0)
        his = [speak(bob, routing_id) for _ in range(3)]
        ping = broker.conductor(broker.folder / "bob.key")
        assert ping.ping() > 0
        for socket in his:
            while socket.poll(50):
                answer = codec.BROKER_TO_CLIENT.decode(socket.recv_multipart())[0]
                assert not isinstance(answer, Welcome) or answer.principal == "bob"
            socket.close(0)


def test_who_shakes_no_hands_disturbs_nobody(broker: KeyedBroker) -> None:
    import socket

    alice = until_in(broker, broker.keys.new("alice"))
    host, port = broker.endpoints["clients"].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(3):
            assert alice.ping(2.0) > 0


# --- workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "reason"), [("unknown", "key_refused"), ("none", "key_required")]
)
def test_a_worker_that_may_not_is_told_so_and_leaves(
    broker: KeyedBroker, which: str, reason: str
) -> None:
    key = load_key(broker.keys.stranger("w")) if which == "unknown" else None
    inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
    link = Link(broker.endpoints["workers"], inbox.put, lambda: (0, False), key=key)
    broker.stack.callback(link.close)
    link.start()
    item = inbox.get(timeout=10)
    assert isinstance(item, Refused)
    assert item.error.reason == reason


def test_a_worker_of_another_broker_says_why_it_waits(
    broker: KeyedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    key = load_key(broker.keys.stranger("w", broker=new_pair().public))
    link = Link(broker.endpoints["workers"], lambda item: None, lambda: (0, False), key=key)
    broker.stack.callback(link.close)
    link.start()
    until(lambda: "wrong_broker_key" in caplog.text, "it is logged")


def ready(device: str) -> Ready:
    return Ready(
        v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR),
        worker="intruder",
        worker_epoch=1 << 62,
        pid=1,
        host="elsewhere",
        version="0",
        build="echo",
        device=DeviceInfo(device=device, kind="cpu", name="x", total_bytes=MIB),
        memory=Memory(used_bytes=0, own_bytes=0, foreign_bytes=0),
    )


def test_a_workers_key_is_for_its_devices_only(broker: KeyedBroker) -> None:
    """Even where the broker takes whatever device comes; the one that serves already stays."""
    broker.keyed_echo()
    path = broker.keys.new("gpu", "worker", devices=("cuda:0", "cuda:1"))
    alice = until_in(broker, broker.keys.new("alice"))
    alice.register("coder", "echo", n_ctx=1024)

    def answer(device: str) -> ToWorker:
        socket = sockets.connect(broker.context, broker.endpoints["workers"], key=load_key(path))
        broker.stack.callback(socket.close, 0)
        socket.send_multipart(codec.WORKER_TO_BROKER.encode(ready(device)))
        assert socket.poll(5_000)
        return codec.BROKER_TO_WORKER.decode(socket.recv_multipart())[0]

    for device in ("cpu", "cuda:2"):
        refusal = answer(device)
        assert isinstance(refusal, WorkerRefused)
        assert (refusal.error.code, refusal.error.reason) == (
            Code.PERMISSION_DENIED,
            "device_denied",
        )
        assert refusal.error.details == {"device": device, "devices": ["cuda:0", "cuda:1"]}
        assert f"--device {device}" in refusal.error.message
    assert tokens(alice) == 4
    assert [device.device for device in alice.status().devices] == ["cpu"]
    assert isinstance(answer("cuda:1"), WorkerWelcome)


def test_a_revoked_worker_is_out_and_another_one_takes_over(broker: KeyedBroker) -> None:
    broker.keyed_echo(name="first")
    before = broker.worker_epoch()
    broker.keys.revoke("first")
    began_s = time.monotonic()
    until(lambda: broker.worker_epoch() is None, "the worker is gone")
    assert time.monotonic() - began_s < QUICK_S
    broker.keyed_echo(name="second")
    assert broker.worker_epoch() not in (None, before)


# --- revoked ------------------------------------------------------------------------------------


def revoked_within_s(broker: KeyedBroker, client: Conductor, name: str) -> float:
    """How long a client in the middle of an answer takes to hear that its key was revoked."""
    reply = client.decode("coder", tokens=[1], max_tokens=1000)
    next(iter(reply))
    broker.keys.revoke(name)
    began_s = time.monotonic()
    with pytest.raises(Unauthenticated) as caught:
        reply.result()
    assert caught.value.reason == "key_revoked"
    return time.monotonic() - began_s


def test_revoking_ends_what_runs_within_a_second(broker: KeyedBroker) -> None:
    broker.keyed_echo(rate=20.0)
    took: list[float] = []
    while not took or (min(took) >= 1.0 and len(took) < 10):  # a busy machine may be late
        client = until_in(broker, broker.keys.new(name := f"alice{len(took)}"))
        client.register("coder", "echo", n_ctx=4096)
        took.append(revoked_within_s(broker, client, name))
    assert min(took) < 1.0


def test_revoking_disturbs_nobody_else(broker: KeyedBroker) -> None:
    broker.keyed_echo(rate=20.0)
    alice = until_in(broker, broker.keys.new("alice"))
    bob = until_in(broker, broker.keys.new("bob"))
    for client in (alice, bob):
        client.register("coder", "echo", n_ctx=4096)
    his = bob.decode("coder", tokens=[1], max_tokens=60)
    assert revoked_within_s(broker, alice, "alice") < QUICK_S
    with pytest.raises(Unauthenticated) as caught:
        alice.ping()
    assert caught.value.reason in ("key_revoked", "key_refused")
    until(lambda: refused(alice), "the connection is closed, too")
    assert his.result().usage.generated_tokens == 60
    root = until_in(broker, broker.keys.new("root", "admin"))
    until(lambda: not root.status().jobs, "the device has stopped")
    assert {agent.principal for agent in root.status().agents} == {"alice", "bob"}


def refused(client: Conductor) -> bool:
    try:
        client.ping()
    except ConductorError as error:
        return error.reason == "key_refused"
    return False


def test_a_connection_without_a_session_is_closed_too(broker: KeyedBroker) -> None:
    path = broker.keys.new("alice")
    until_in(broker, path).close()
    socket = sockets.connect(broker.context, broker.endpoints["clients"], key=load_key(path))
    broker.stack.callback(socket.close, 0)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    broker.stack.callback(monitor.close, 0)
    socket.send_multipart([b"nonsense", b"\x80"])
    assert socket.poll(5_000)
    socket.recv_multipart()
    broker.keys.revoke("alice")
    assert monitor.poll(5_000), "the broker has hung up"


def test_a_name_can_be_given_anew(broker: KeyedBroker) -> None:
    old = broker.keys.new("alice")
    until_in(broker, old)
    broker.keys.revoke("alice")
    old.unlink()
    assert until_in(broker, broker.keys.new("alice")).ping() > 0


def test_a_list_that_cannot_be_read_leaves_everything_as_it_was(broker: KeyedBroker) -> None:
    alice = until_in(broker, broker.keys.new("alice"))
    text = broker.keys.store.list_path.read_text()
    broker.keys.store.list_path.write_text("{")
    until(lambda: "broker.keys_unreadable" in broker.log, "it is logged")
    assert alice.ping() > 0
    broker.keys.store.list_path.write_text(text)
    broker.keys.revoke("alice")
    until(lambda: refused(alice), "the list is read again")


# --- roles --------------------------------------------------------------------------------------


def test_an_observer_looks_and_changes_nothing(broker: KeyedBroker) -> None:
    broker.keyed_echo()
    alice = until_in(broker, broker.keys.new("alice"))
    alice.register("coder", "echo", n_ctx=1024)
    eye = until_in(broker, broker.keys.new("eye", "observer", principal="alice"))
    assert [agent.agent for agent in eye.list()] == ["coder"]
    assert [agent.agent for agent in eye.status().agents] == ["coder"]
    for forbidden in (
        lambda: tokens(eye),
        lambda: eye.register("other", "echo", n_ctx=256),
        lambda: eye.unregister("coder"),
        lambda: eye.reset("coder"),
        lambda: eye.lease("gpu", MIB),
    ):
        with pytest.raises(PermissionDenied) as caught:
            forbidden()
        assert caught.value.reason == "role_denied"
    assert tokens(alice) == 4


def test_another_principals_agent_does_not_exist(broker: KeyedBroker) -> None:
    broker.keyed_echo()
    alice = until_in(broker, broker.keys.new("alice"))
    bob = until_in(broker, broker.keys.new("bob"))
    root = until_in(broker, broker.keys.new("root", "admin"))
    alice.register("coder", "echo", n_ctx=1024)
    for forbidden in (lambda: tokens(bob), lambda: bob.unregister("coder")):
        with pytest.raises(NotFound) as caught:
            forbidden()
        assert caught.value.reason == "no_such_agent"
    assert bob.list() == []
    assert bob.status().agents == []
    assert "alice" not in str(bob.status())
    assert [agent.principal for agent in root.status().agents] == ["alice"]
    bob.register("coder", "echo", n_ctx=512)
    assert {agent.n_ctx for agent in alice.list()} == {1024}
    with pytest.raises(PermissionDenied):
        bob.unregister("coder", principal="alice")
    root.unregister("coder", principal="alice")
    assert alice.list() == []
    assert [agent.agent for agent in bob.list()] == ["coder"]
    with pytest.raises(NotFound):
        root.unregister("coder", principal="alice")


# --- quotas -------------------------------------------------------------------------------------


def test_too_many_agents(broker: KeyedBroker) -> None:
    broker.keyed_echo()
    alice = until_in(broker, broker.keys.new("alice", agents=1))
    alice.register("one", "echo", n_ctx=256)
    with pytest.raises(ResourceExhausted) as caught:
        alice.register("two", "echo", n_ctx=256)
    assert caught.value.reason == "quota_exceeded"
    numbers = {"field": "agents", "limit": 1, "used": 1, "requested": 1}
    assert caught.value.details == numbers
    alice.register("one", "echo", n_ctx=256)  # the same again is no second one
    alice.unregister("one")
    alice.register("two", "echo", n_ctx=256)


def test_too_many_bytes(broker: KeyedBroker) -> None:
    """The echo worker's sizes: 100 MiB of weights, 4 MiB and 16 KiB a cell of pool."""
    broker.keyed_echo()
    alice = until_in(broker, broker.keys.new("alice", vram_bytes=124 * MIB))
    bob = until_in(broker, broker.keys.new("bob", kv_bytes=6 * MIB))
    alice.register("one", "echo", n_ctx=1024)
    with pytest.raises(ResourceExhausted) as caught:
        alice.register("two", "echo", n_ctx=2048)
    details = caught.value.details
    assert (details["field"], details["limit"]) == ("vram_bytes", 124 * MIB)
    assert details["used"] + details["requested"] > 124 * MIB
    with pytest.raises(OutOfRange) as never:
        alice.lease("gpu", 125 * MIB)
    assert never.value.reason == "quota_exceeded"
    with pytest.raises(ResourceExhausted):
        alice.lease("gpu", 8 * MIB)
    bob.register("one", "echo", n_ctx=256)
    with pytest.raises(ResourceExhausted) as kv:
        bob.register("two", "echo", n_ctx=256)
    assert kv.value.details["field"] == "kv_bytes"
    assert kv.value.details["used"] == 4 * MIB
    assert [agent.agent for agent in alice.list() + bob.list()] == ["one", "one"]
    assert tokens(alice, "one") == 4


def test_too_many_waiting_jobs(broker: KeyedBroker) -> None:
    broker.keyed_echo(rate=5.0)
    alice = until_in(broker, broker.keys.new("alice", queued_jobs=2))
    alice.register("coder", "echo", n_ctx=4096)
    replies = [alice.decode("coder", tokens=[1], max_tokens=100) for _ in range(3)]
    next(iter(replies[0]))
    with pytest.raises(ResourceExhausted) as caught:
        alice.decode("coder", tokens=[1], max_tokens=1).result()
    assert caught.value.reason == "quota_exceeded"
    assert caught.value.details["field"] == "queued_jobs"
    assert caught.value.retry_after_ms
    for reply in replies:
        reply.cancel()
    until(lambda: not alice.status().jobs, "they are cancelled")
    assert tokens(alice, pieces=1) == 1


# --- starting -----------------------------------------------------------------------------------


def started(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit code and log of a broker that does not come up."""
    with BrokerProcess(folder, *flags) as process:
        assert process.endpoints == {}
        return process.wait(), process.log


@pytest.mark.parametrize("which", ["clients", "workers"])
def test_an_open_address_without_keys_is_refused_with_the_command(
    short_tmp: Path, which: str
) -> None:
    code, log = started(short_tmp, f"--{which}", "tcp://0.0.0.0:0")
    assert code == 64
    assert "auth_required" in log
    assert "conductor keys new NAME" in log


def test_with_keys_it_may_be_open(short_tmp: Path) -> None:
    key = Keys(short_tmp).new("alice")
    with BrokerProcess(short_tmp, "--clients", "tcp://0.0.0.0:0") as broker:
        endpoint = broker.endpoints["clients"].replace("0.0.0.0", "127.0.0.1")
        with Conductor(endpoint, key=key) as alice:
            assert alice.ping() > 0
        with pytest.raises(Unauthenticated):
            Conductor(endpoint)
        assert broker.endpoints["workers"].startswith("ipc://")


@pytest.mark.parametrize("name", ["keys.json", "broker.key"])
def test_keys_that_others_can_read_are_refused(short_tmp: Path, name: str) -> None:
    keys = Keys(short_tmp)
    (keys.store.path / name).chmod(0o640)
    code, log = started(short_tmp, "--clients", ANY_PORT)
    assert code == 64
    assert "unsafe_key_file" in log
    assert "chmod 600" in log


def test_a_folder_of_keys_that_others_can_enter_is_refused(short_tmp: Path) -> None:
    Keys(short_tmp).store.path.chmod(0o755)
    code, log = started(short_tmp, "--clients", ANY_PORT)
    assert code != 0
    assert "unsafe_directory" in log


def test_a_damaged_list_is_refused(short_tmp: Path) -> None:
    keys = Keys(short_tmp)
    keys.store.list_path.write_text('{"keys": [{"name": "x"}]}')
    code, log = started(short_tmp, "--clients", ANY_PORT)
    assert code == 64
    assert "bad_key_file" in log


def test_a_key_file_that_others_can_read_is_refused(broker: KeyedBroker) -> None:
    path = broker.keys.new("alice")
    path.chmod(0o644)
    error, _ = broker.refusal(path)
    assert error.reason == "unsafe_key_file"
    assert f"chmod 600 {path}" in str(error)
    path.chmod(0o600)
    assert until_in(broker, path).ping() > 0


def test_over_ipc_keys_change_nothing(short_tmp: Path) -> None:
    Keys(short_tmp).new("alice")
    with BrokerProcess(short_tmp) as broker:
        broker.echo()
        client = broker.client()
        assert client.welcome is not None
        assert client.welcome.principal == "local"
        client.register("coder")
        assert client.usage(client.decode("coder", 3)).generated_tokens == 3
