"""The broker as a process: starting, refusing to start, bad clients, draining, stopping."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from broker_process import BrokerProcess, RawClient, until

from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.limits import PREAMBLE
from vram_conductor.protocol.messages import (
    Error,
    GoAway,
    Ok,
    Ping,
    Progress,
    Register,
    Resume,
    Status,
    Tokens,
)
from vram_conductor.protocol.values import Usage


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(short_tmp) as process:
        yield process


def refused(folder: Path, *flags: str, own_folders: bool = True, **how: str) -> tuple[int, str]:
    """Exit code and log of a broker that does not come up."""
    with BrokerProcess(folder, *flags, env=how, own_folders=own_folders) as process:
        assert process.endpoints == {}
        return process.wait(), process.log


# --- starting ---------------------------------------------------------------------------------


def test_it_says_where_it_listens_and_answers_there(broker: BrokerProcess) -> None:
    assert set(broker.endpoints) == {"clients", "workers"}
    client = broker.client()
    client.ping()
    report = client.status()
    assert client.welcome is not None
    assert report.broker_epoch == client.welcome.broker_epoch
    assert re.match(r"\d+\.\d+", report.version)
    assert report.journal_trouble == ""


def test_a_second_broker_on_the_same_state_is_refused_with_the_pid(broker: BrokerProcess) -> None:
    code, log = refused(broker.folder)
    assert code == 69
    assert f"pid {broker.process.pid}" in log
    assert "--state-dir" in log
    broker.client().ping()


def test_a_second_broker_on_the_same_socket_is_refused_with_the_pid(broker: BrokerProcess) -> None:
    code, log = refused(broker.folder, "--state-dir", str(broker.folder / "other"))
    assert code == 69
    assert f"process {broker.process.pid}" in log
    broker.client().ping()


def test_a_taken_port_is_refused(short_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = refused(short_tmp, "--clients", f"tcp://127.0.0.1:{port}")
        assert (code, "in use" in log) == (69, True)
        code, log = refused(short_tmp, "--metrics-port", str(port))
        assert (code, f"port {port}" in log) == (69, True)
    # Nothing stays locked or bound.
    with BrokerProcess(short_tmp, "--clients", f"tcp://127.0.0.1:{port}") as process:
        process.client().ping()


def test_after_kill_9_the_addresses_are_free_again(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as first:
        first.kill()
    with BrokerProcess(short_tmp) as second:
        second.client().ping()


def test_an_address_that_others_can_reach_is_refused(short_tmp: Path) -> None:
    code, log = refused(short_tmp, "--clients", "tcp://0.0.0.0:0")
    assert (code, "auth_required" in log) == (64, True)


def test_a_folder_that_others_can_enter_is_refused(short_tmp: Path) -> None:
    (short_tmp / "r").mkdir(mode=0o755)
    code, log = refused(short_tmp)
    assert (code, "chmod it to 700" in log) == (69, True)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[broker]\nclienst = 'x'\n", "clienst"),
        ("[broker]\nmetrics_port = 'many'\n", "metrics_port"),
        ("[broker]\nworker_inflight = 0\n", "worker_inflight"),
        ("[broker\n", "config.toml"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(short_tmp: Path, toml: str, said: str) -> None:
    path = short_tmp / "config.toml"
    path.write_text(toml)
    code, log = refused(short_tmp, "--config", str(path))
    assert (code, said in log) == (64, True)


def test_a_missing_configuration_and_an_unknown_flag_are_usage_errors(short_tmp: Path) -> None:
    assert refused(short_tmp, "--config", str(short_tmp / "no.toml"))[0] == 64
    code, log = refused(short_tmp, "--frobnicate")
    assert (code, "--frobnicate" in log) == (64, True)
    assert refused(short_tmp, VRAM_CONDUCTOR_BROKER_METRICS_PRT="1")[0] == 64


def test_flags_win_over_the_environment_over_the_file(short_tmp: Path) -> None:
    path = short_tmp / "config.toml"
    names = {name: str(short_tmp / name) for name in ("file", "env", "flag")}
    path.write_text(
        f"[broker]\nruntime_dir = '{names['file']}'\nstate_dir = '{names['file']}'\n"
        f"clients = 'ipc://{names['file']}/c'\n"
    )
    env = {
        "VRAM_CONDUCTOR_CONFIG": str(path),
        "VRAM_CONDUCTOR_BROKER_RUNTIME_DIR": names["env"],
        "VRAM_CONDUCTOR_BROKER_STATE_DIR": names["env"],
    }
    with BrokerProcess(
        short_tmp, "--state-dir", names["flag"], env=env, own_folders=False
    ) as process:
        assert process.endpoints["clients"] == f"ipc://{names['file']}/c"
        assert process.endpoints["workers"] == f"ipc://{names['env']}/workers.ipc"
        assert (short_tmp / "flag" / "journal.vmcj").exists()


# --- clients ----------------------------------------------------------------------------------


def test_without_hello_there_is_no_session(broker: BrokerProcess) -> None:
    client = broker.client(hello=False)
    for message in (Ping(n=1), Status(rid=new_rid())):
        client.send(message)
        error = client.expect(Error)
        assert error.error.code == Code.FAILED_PRECONDITION
        assert error.error.reason == "no_session"
    client.hello()
    client.ping()


def test_a_bad_request_is_answered_by_its_rid_and_disturbs_no_stream(
    broker: BrokerProcess,
) -> None:
    broker.echo(rate=200)
    good, bad = broker.client(), broker.client()
    good.register("a")
    rid = good.decode("a", pieces=60)
    good.expect(Tokens)
    wrong = new_rid()
    body = msgpack.packb({"t": "REGISTER", "rid": wrong, "agent": 5, "model": "echo"})
    for frames, expected_rid in (
        ([b"HTTP", b"GET /"], b""),
        ([PREAMBLE], b""),
        ([PREAMBLE, b"\x91" * 100_000], b""),
        ([PREAMBLE, body], wrong),
    ):
        bad.socket.send_multipart(frames)
        assert bad.expect(Error).rid == expected_rid
    bad.ping()
    last = good.receive()
    while isinstance(last, Tokens):
        last = good.receive()
    assert (last.rid, last.usage.generated_tokens) == (rid, 60)


def test_a_reader_that_never_reads_does_not_fill_the_memory(broker: BrokerProcess) -> None:
    broker.echo()
    quick, dead = broker.client(), broker.client(hwm=10)
    quick.register("quick")
    for number in range(4):
        quick.register(f"dead{number}")
    quick.usage(quick.decode("quick", pieces=500))
    before = broker.rss_bytes
    for number in range(4):
        dead.decode(f"dead{number}", pieces=10_000)
    usage = quick.usage(quick.decode("quick", pieces=500))
    assert usage.generated_tokens == 500
    until(lambda: quick.status().jobs_done == 6, "the unread replies are done, too")
    quick.ping()
    assert broker.rss_bytes - before < 60_000_000


def test_a_request_that_comes_before_the_worker_waits_for_it(broker: BrokerProcess) -> None:
    early, late = broker.client(), new_rid()
    early.send(Register(rid=late, agent="a", model="echo", n_ctx=4096))
    assert early.expect(Progress, late).stage == "worker"
    broker.echo()
    assert early.expect(Ok, late).body["state"] == "ready"
    assert early.usage(early.decode("a", pieces=3)).generated_tokens == 3


def test_a_long_reply_is_fetched_whole_while_others_are_served(broker: BrokerProcess) -> None:
    broker.echo()
    slow, quick = broker.client(), broker.client()
    slow.register("a", n_ctx=100_000)
    rid = slow.decode("a", pieces=40_000, detach=True, window=0)
    until(lambda: quick.status().jobs_done == 1, "the reply is complete")
    before = broker.rss_bytes
    slow.send(Resume(rid=rid))
    for _ in range(20):
        quick.ping()
    # More than libzmq takes at once, to a client that has not read anything so far.
    pieces, end = slow.result(rid)
    assert (len(pieces), isinstance(end, Usage)) == (40_000, True)
    assert broker.rss_bytes - before < 60_000_000


# --- stopping ---------------------------------------------------------------------------------


def test_sigterm_lets_a_running_job_finish(broker: BrokerProcess) -> None:
    worker = broker.echo(rate=100)
    client = broker.client()
    client.register("a")
    rid = client.decode("a", pieces=50)
    client.expect(Tokens)
    broker.signal(signal.SIGTERM)
    seen = [client.receive()]
    while getattr(seen[-1], "usage", None) is None:
        seen.append(client.receive())
    assert sum(isinstance(message, GoAway) for message in seen) == 1
    assert seen[-1].rid == rid
    assert isinstance(seen[-1].usage, Usage)
    assert seen[-1].usage.generated_tokens == 50
    assert broker.wait() == 0
    assert worker.wait(20) == 0, "the worker was drained, too"


def test_a_drain_takes_no_longer_than_it_may(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp, "--drain-ms", "600") as broker:
        worker = broker.echo(rate=20)
        client = broker.client()
        client.register("a")
        client.decode("a", pieces=10_000)
        client.expect(Tokens)
        start_s = time.monotonic()
        broker.signal(signal.SIGINT)
        assert broker.wait() == 0
        assert time.monotonic() - start_s < 10
        worker.wait(20)


def test_a_second_signal_ends_it_at_once(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp, "--drain-ms", "600000") as broker:
        broker.echo(rate=20)
        client = broker.client()
        client.register("a")
        rid = client.decode("a", pieces=10_000)
        client.expect(Tokens)
        broker.signal(signal.SIGTERM)
        client.expect(GoAway)
        broker.signal(signal.SIGTERM)
        _, end = _skip_to_end(client, rid)
        assert isinstance(end, ErrorInfo)
        assert end.reason == "draining"
        assert broker.wait() == 0


def _skip_to_end(client: RawClient, rid: bytes) -> tuple[int, Usage | ErrorInfo]:
    count = 0
    while True:
        message = client.receive()
        if isinstance(message, Error) and message.rid == rid:
            return count, message.error
        count += isinstance(message, Tokens)


def test_it_leaves_when_its_supervisor_is_gone(short_tmp: Path) -> None:
    with BrokerProcess(short_tmp) as broker:
        broker.client().ping()
        broker.abandon()
        assert broker.wait() == 0


def test_a_bug_ends_the_process_with_its_own_code_and_loses_nothing(short_tmp: Path) -> None:
    code = (
        "import sys\n"
        "from vram_conductor.broker.shell import app\n"
        "from vram_conductor.protocol.messages import Ping\n"
        "real = app.Core.handle\n"
        "def handle(self, event, now_ns):\n"
        "    if isinstance(getattr(event, 'message', None), Ping):\n"
        "        raise RuntimeError('a bug')\n"
        "    return real(self, event, now_ns)\n"
        "app.Core.handle = handle\n"
        "sys.exit(app.main())\n"
    )
    with BrokerProcess(short_tmp, code=code) as broker:
        broker.echo()
        client = broker.client()
        client.register("a")
        client.usage(client.decode("a"))
        client.send(Ping(n=1))
        assert broker.wait() == 70
        assert "a bug" in broker.log
    with BrokerProcess(short_tmp) as broker:
        assert [agent.agent for agent in broker.client().agents()] == ["a"]


# --- metrics ----------------------------------------------------------------------------------


def test_metrics_tell_what_happened(short_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with BrokerProcess(short_tmp, "--metrics-port", str(port)) as broker:
        broker.echo()
        client = broker.client()
        client.register("a")
        client.usage(client.decode("a", pieces=30))
        client.send(Status(rid=b"short"))
        client.expect(Error)

        def page() -> str:
            client.ping()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        until(lambda: 'jobs_total{result="done"} 1.0' in page(), "the snapshot is taken")
        text = page()
        for line in (
            'vram_conductor_tokens_total{kind="generated"} 30.0',
            'vram_conductor_errors_total{code="INVALID_ARGUMENT",reason="bad_rid"} 1.0',
            'vram_conductor_worker_starts_total{device="cpu"} 1.0',
            "vram_conductor_agents 1.0",
            "vram_conductor_journal_waiting_records 0.0",
        ):
            assert line in text, line
        assert re.search(r'vram_conductor_bytes\{device="cpu",what="promised"\} [1-9]', text)


def test_a_missing_metrics_package_is_said_clearly(short_tmp: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "from vram_conductor.broker.shell import app\n"
        "sys.exit(app.main())\n"
    )
    with BrokerProcess(short_tmp, "--metrics-port", "1", code=code) as broker:
        assert broker.wait() == 69
        assert "pip install prometheus-client" in broker.log


def test_the_broker_needs_neither_llama_nor_numpy() -> None:
    code = "import sys, vram_conductor.broker.shell.app; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert not loaded & {"llama_cpp", "numpy", "prometheus_client", "pynvml", "xxhash"}
