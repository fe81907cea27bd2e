"""The supervisor, with stand-ins for broker and workers (real processes, real signals)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_parts import PATIENCE_S, FakeParts, eventually, running, state

from vram_conductor.client import child, supervisor
from vram_conductor.client.child import BACKOFF_MAX_S, Child, backoff_s
from vram_conductor.client.supervisor import FINAL_EXIT_CODES, Supervisor
from vram_conductor.protocol.errors import Unavailable

ENDPOINTS = {"clients": "ipc:///c", "workers": "ipc:///w"}


class Running:
    """A supervisor that runs in a thread."""

    def __init__(self, parts: FakeParts, devices: list[str], **options: Any) -> None:
        self.parts = parts
        self.news: list[str] = []
        self.supervisor = Supervisor(None, devices, say=self.news.append, **options)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def start(self) -> None:
        assert self.supervisor.start() == ENDPOINTS
        self._thread.start()

    def join(self) -> int:
        self._thread.join(PATIENCE_S)
        assert self.code is not None, f"it does not end; {self.news}"
        return self.code

    def stop(self) -> int:
        self.supervisor.stop()
        return self.join()

    def pids(self) -> list[int]:
        return [item.pid for item in self.supervisor.children]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeParts:
    made = FakeParts(tmp_path)
    monkeypatch.setattr(supervisor, "sys", SimpleNamespace(executable=str(made.executable)))
    # As fast as it can be told apart; the real numbers are checked as numbers.
    monkeypatch.setattr(child, "BACKOFF_FIRST_S", 0.02)
    monkeypatch.setattr(supervisor, "TERM_GRACE_S", 5.0)
    return made


@pytest.fixture
def begin(parts: FakeParts) -> Iterator[Callable[..., Running]]:
    """Start a supervisor; whatever happens, nothing of it is left."""
    begun: list[Running] = []

    def start(*devices: str, **options: Any) -> Running:
        parts.write()
        item = Running(parts, list(devices or ("cpu",)), **options)
        begun.append(item)
        item.start()
        return item

    yield start
    for item in begun:
        item.supervisor.stop()
        item.supervisor.stop()
        item.supervisor.shutdown()
        for part in item.supervisor.children:
            assert not part.alive


# --- back-off ---------------------------------------------------------------------------------


def test_backoff_doubles_up_to_a_bound() -> None:
    pauses = [backoff_s(failures) for failures in range(1, 12)]
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_MAX_S
    assert backoff_s(10**9) == BACKOFF_MAX_S
    assert backoff_s(0) == 0.25


def test_early_deaths_are_counted_and_a_long_life_forgives(
    parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.worker = "sys.exit(70)"
    command = [parts.write(), "-m", "x.worker", "--device", "cpu"]
    life_r, life_w = os.pipe()
    part = Child("worker", command)
    try:
        for failures in (1, 2, 3):
            part.start(life_r, capture=False, log=None, env=None)
            assert part.process is not None
            part.process.wait()
            assert part.cause == "exit code 70"
            lived_s, pause_s = part.plan_restart()
            assert part.failures == failures
            assert pause_s == pytest.approx(0.02 * 2 ** (failures - 1))
            assert lived_s < 10
        monkeypatch.setattr(child, "STABLE_S", 0.0)
        assert part.plan_restart()[1] == pytest.approx(0.02)
        assert part.failures == 1
    finally:
        part.close()
        os.close(life_r)
        os.close(life_w)


# --- the good way -----------------------------------------------------------------------------


def test_broker_first_then_workers_which_are_told_where_it_is(
    begin: Callable[..., Running], parts: FakeParts
) -> None:
    item = begin("cpu", "cpu:1")
    starts = [parts.wait_for("start", name) for name in ("broker", "cpu", "cpu:1")]
    assert "--print-endpoints" in starts[0]["flags"]
    for start, name in zip(starts[1:], ("cpu", "cpu:1"), strict=True):
        flags = start["flags"]
        assert flags[flags.index("--device") + 1] == name
        assert flags[flags.index("--workers") + 1] == ENDPOINTS["workers"]
    assert item.stop() == 0
    assert item.news == []
    ends = parts.events("end")
    assert ends[0]["name"] == "broker", "it drains before its workers go"
    assert {end["why"] for end in ends} == {"TERM"}
    assert not any(running(pid) for pid in item.pids())


def test_flags_environment_and_log(
    begin: Callable[..., Running], parts: FakeParts, tmp_path: Path, capfd: Any
) -> None:
    parts.worker = "print('on stdout', flush=True); sys.stderr.write('on stderr\\n'); serve()"
    log = tmp_path / "log"
    item = begin(
        broker_args=["--log-level", "debug"],
        worker_args=["--hang-ms", "5"],
        env={"ONLY": "this"},
        log=log,
    )
    start = parts.wait_for("start", "cpu")
    assert start["flags"][:2] == ["--hang-ms", "5"]
    assert start["env"]["ONLY"] == "this"
    assert "HOME" not in start["env"]
    assert parts.events("start", "broker")[0]["flags"][:2] == ["--log-level", "debug"]
    eventually(lambda: "on stderr" in log.read_text(), "the log has it")
    item.stop()
    assert sorted(log.read_text().splitlines()) == ["on stderr", "on stdout"]
    assert capfd.readouterr() == ("", "")


def test_what_a_part_prints_never_gets_among_our_results(
    begin: Callable[..., Running], parts: FakeParts, capfd: Any
) -> None:
    parts.worker = "print('from a library', flush=True); note('said'); serve()"
    item = begin()
    parts.wait_for("said", "cpu")
    item.stop()
    out, err = capfd.readouterr()
    assert out == ""
    assert "from a library" in err


# --- deaths -----------------------------------------------------------------------------------


def test_a_killed_worker_comes_back_and_again(
    begin: Callable[..., Running], parts: FakeParts
) -> None:
    item = begin()
    broker = parts.wait_for("start", "broker")["pid"]
    for life in range(1, 5):
        pid = parts.wait_for("start", "cpu", life)["pid"]
        os.kill(pid, signal.SIGKILL)
        parts.wait_for("start", "cpu", life + 1)
        assert state(pid) == "", "no zombie is left"
    assert len(parts.events("start", "broker")) == 1
    assert item.supervisor.children[0].pid == broker
    assert item.supervisor.children[1].restarts == 4
    assert len(item.news) == 4
    assert item.news[0].startswith("worker cpu (pid ")
    assert "SIGKILL; starting it again in 0.02 s" in item.news[0]
    assert "conductor doctor" not in item.news[1]
    assert "3 times in a row" in item.news[2]
    assert "conductor doctor" in item.news[2]
    assert item.stop() == 0


@pytest.mark.parametrize("code", [0, 1, 70, 75])
def test_a_worker_that_exits_comes_back(
    begin: Callable[..., Running], parts: FakeParts, code: int
) -> None:
    parts.worker = f"if run == 1: sys.exit({code})\nserve()"
    item = begin()
    parts.wait_for("start", "cpu", 2)
    said = f"exit code {code}" if code else "has left: starting its successor"
    assert said in item.news[0]
    assert item.stop() == 0


def test_a_killed_broker_comes_back_where_it_was_and_workers_stay(
    begin: Callable[..., Running], parts: FakeParts
) -> None:
    item = begin("cpu", "cpu:1")
    workers = [parts.wait_for("start", name)["pid"] for name in ("cpu", "cpu:1")]
    for life in (1, 2):
        os.kill(parts.wait_for("start", "broker", life)["pid"], signal.SIGKILL)
        flags = parts.wait_for("start", "broker", life + 1)["flags"]
        assert flags[flags.index("--clients") + 1] == ENDPOINTS["clients"]
        assert flags[flags.index("--workers") + 1] == ENDPOINTS["workers"]
        assert flags.count("--clients") == 1
        assert "--print-endpoints" not in flags
    assert all(running(pid) for pid in workers)
    assert item.pids()[1:] == workers
    assert item.stop() == 0


def test_two_die_at_once(begin: Callable[..., Running], parts: FakeParts) -> None:
    item = begin("cpu", "cpu:1")
    pids = [parts.wait_for("start", name)["pid"] for name in ("broker", "cpu", "cpu:1")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for name in ("broker", "cpu", "cpu:1"):
        parts.wait_for("start", name, 2)
    assert item.stop() == 0


def test_deaths_are_noticed_without_pidfd(
    begin: Callable[..., Running], parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such_call(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_such_call)
    item = begin()
    os.kill(parts.wait_for("start", "cpu")["pid"], signal.SIGKILL)
    parts.wait_for("start", "cpu", 2)
    assert item.stop() == 0


def test_restarts_leak_no_descriptors(begin: Callable[..., Running], parts: FakeParts) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    item = begin()
    for life in range(1, 4):
        for name in ("broker", "cpu"):
            os.kill(parts.wait_for("start", name, life)["pid"], signal.SIGKILL)
            parts.wait_for("start", name, life + 1)
    # Two for the pipe that lives as long as we do, two for waking up, one per child.
    assert len(os.listdir("/proc/self/fd")) <= before + 6  # noqa: PTH208
    item.stop()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208


def test_a_supervisor_that_is_forgotten_has_no_descriptors(parts: FakeParts) -> None:
    parts.write()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        Supervisor(None, []).shutdown()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


@pytest.mark.parametrize("code", sorted(FINAL_EXIT_CODES))
@pytest.mark.parametrize("part", ["broker", "worker cpu"])
def test_what_cannot_be_helped_stops_everything_with_its_code(
    begin: Callable[..., Running], parts: FakeParts, part: str, code: int
) -> None:
    give_up = f"while not os.path.exists(folder + '/now'): time.sleep(0.01)\nsys.exit({code})"
    if part == "broker":
        parts.broker = f"announce()\n{give_up}"
    else:
        parts.worker = (
            f"if name == 'cpu':\n    {give_up.replace(chr(10), chr(10) + '    ')}\nserve()"
        )
    item = begin("cpu", "cpu:1")
    parts.wait_for("start", "cpu")
    other = parts.wait_for("start", "cpu:1")["pid"]
    (parts.folder / "now").touch()
    assert item.join() == code
    assert item.news == [f"{part} gave up (exit code {code}); its message is above"]
    assert not any(running(pid) for pid in [*item.pids(), other])
    assert len(parts.events("start", "cpu")) == 1


# --- the start --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 64, 69])
def test_a_broker_that_does_not_start(parts: FakeParts, code: int, tmp_path: Path) -> None:
    parts.broker = f"sys.stderr.write('the reason\\n'); sys.exit({code})"
    parts.write()
    log = tmp_path / "log"
    item = Supervisor(None, ["cpu"], log=log)
    with pytest.raises(Unavailable) as caught:
        item.start()
    item.shutdown()
    assert caught.value.reason == "broker_failed"
    assert caught.value.details["exit_code"] == code
    assert str(log) in caught.value.info.message
    assert log.read_text() == "the reason\n"
    assert not parts.events("start", "cpu")


def test_a_broker_that_stays_silent(parts: FakeParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BROKER_READY_S", 0.2)
    parts.broker = "serve()"
    parts.write()
    item = Supervisor(None, ["cpu"])
    with pytest.raises(Unavailable, match="said nothing"):
        item.start()
    assert not item.children[0].alive
    item.shutdown()


def test_stop_while_the_broker_is_starting(parts: FakeParts) -> None:
    parts.broker = "serve()"
    parts.write()
    item = Supervisor(None, ["cpu"])
    threading.Timer(0.2, item.stop).start()
    assert item.start() == {}
    assert item.run() == 0
    assert not item.children[0].alive
    assert not parts.events("start", "cpu")


# --- the end ----------------------------------------------------------------------------------


def test_whoever_ignores_sigterm_is_killed_with_all_it_started(
    begin: Callable[..., Running], parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "TERM_GRACE_S", 0.3)
    parts.worker = """\
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
note('forked', child=child)
ignore()"""
    item = begin()
    forked = parts.wait_for("forked", "cpu")
    parts.wait_for("stubborn", "cpu")
    assert item.stop() == 0
    assert item.news == [f"worker cpu (pid {forked['pid']}) ignores SIGTERM: killing it"]
    assert state(forked["pid"]) == ""
    eventually(lambda: not running(forked["child"]), "what it had started is gone, too")


def test_a_broker_that_ignores_sigterm_is_killed(
    begin: Callable[..., Running], parts: FakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "TERM_GRACE_S", 0.2)
    parts.broker = "announce(); ignore()"
    item = begin(drain_s=0.1)
    parts.wait_for("stubborn", "broker")
    assert item.stop() == 0
    assert "broker" in item.news[0]
    assert not any(running(pid) for pid in item.pids())


def test_the_drain_is_waited_for(begin: Callable[..., Running], parts: FakeParts) -> None:
    parts.broker = "announce(); serve(); time.sleep(0.5); note('drained')"
    item = begin(drain_s=20.0)
    parts.wait_for("start", "cpu")
    assert item.stop() == 0
    assert item.news == []
    assert parts.events("drained", "broker"), "it was not killed in the middle"


def test_a_second_stop_waits_for_nothing(begin: Callable[..., Running], parts: FakeParts) -> None:
    parts.broker = "announce(); serve(); note('draining'); time.sleep(600)"
    item = begin(drain_s=600.0)
    parts.wait_for("start", "cpu")
    assert item.supervisor.stop() is True
    parts.wait_for("draining", "broker")
    assert item.code is None
    assert item.supervisor.stop() is False
    assert item.join() == 0
    assert not any(running(pid) for pid in item.pids())


def test_shutdown_again_and_late_stops_are_harmless(
    begin: Callable[..., Running], parts: FakeParts
) -> None:
    item = begin()
    item.stop()
    # The descriptors that it gave back may be anybody's by now.
    others = [os.pipe() for _ in range(8)]
    item.supervisor.shutdown()
    item.supervisor.stop()
    for read_end, write_end in others:
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 1)
        os.close(read_end)
        os.close(write_end)


# --- as a process -----------------------------------------------------------------------------

_PROCESS = """\
import signal, sys
from types import SimpleNamespace
from vram_conductor.client import supervisor
supervisor.sys = SimpleNamespace(executable=sys.argv[1])
item = supervisor.Supervisor(None, ["cpu"], drain_s=600.0)
signal.signal(signal.SIGTERM, lambda *_: item.stop())
item.start()
print("up", flush=True)
sys.exit(item.run())
"""


@contextlib.contextmanager
def process(parts: FakeParts) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROCESS, parts.write()], stdout=subprocess.PIPE, text=True
    ) as running_:
        assert running_.stdout is not None
        try:
            assert running_.stdout.readline() == "up\n"
            yield running_
        finally:
            running_.kill()


def test_children_leave_when_their_supervisor_is_killed(parts: FakeParts) -> None:
    with process(parts) as killed:
        pids = [parts.wait_for("start", name)["pid"] for name in ("broker", "cpu")]
        killed.kill()
        killed.wait()
        for name in ("broker", "cpu"):
            assert parts.wait_for("end", name)["why"] == "EOF"
        eventually(lambda: not any(running(pid) for pid in pids), "they are gone")


def test_stop_works_in_a_signal_handler(parts: FakeParts) -> None:
    with process(parts) as told:
        parts.wait_for("start", "cpu")
        began = time.monotonic()
        told.send_signal(signal.SIGTERM)
        assert told.wait(PATIENCE_S) == 0
        assert time.monotonic() - began < PATIENCE_S / 2
    assert [end["why"] for end in parts.events("end")] == ["TERM", "TERM"]


def test_a_second_signal_waits_for_nothing(parts: FakeParts) -> None:
    parts.broker = "announce(); serve(); note('draining'); time.sleep(600)"
    with process(parts) as told:
        pids = [parts.wait_for("start", name)["pid"] for name in ("broker", "cpu")]
        told.send_signal(signal.SIGTERM)
        parts.wait_for("draining", "broker")
        told.send_signal(signal.SIGTERM)
        assert told.wait(PATIENCE_S) == 0
        assert not any(running(pid) for pid in pids)
