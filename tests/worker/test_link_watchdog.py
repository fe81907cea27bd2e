"""The watchdog and the pace of reports, purely."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from worker_process import WorkerProcess

from vram_conductor.worker.reporter import Reporter
from vram_conductor.worker.watchdog import EXIT_HANG, Watchdog, give_up, io_bytes

MS = 1_000_000


def test_a_busy_engine_that_steps_is_alive() -> None:
    watchdog = Watchdog(1000, 0)
    for now in range(0, 10_000, 100):
        assert not watchdog.hangs(now, True, 0, now * MS)


def test_an_idle_engine_never_hangs() -> None:
    watchdog = Watchdog(1000, 0)
    assert not watchdog.hangs(5, False, 0, 0)
    assert not watchdog.hangs(5, False, 0, 99_000 * MS)
    assert not watchdog.hangs(5, False, 0, 99_900 * MS)
    assert not asked(watchdog, 100_000, 100_800), "busy only now"
    assert watchdog.hangs(5, True, 0, 100_900 * MS)


def asked(watchdog: Watchdog, first_ms: int, last_ms: int, steps: int = 5) -> bool:
    """Ask every 100 ms, of a busy engine that does not step; the last answer."""
    hangs = False
    for now in range(first_ms, last_ms + 1, 100):
        hangs = watchdog.hangs(steps, True, 0, now * MS)
        assert not hangs or now == last_ms
    return hangs


def test_a_busy_engine_without_steps_hangs_after_the_time() -> None:
    watchdog = Watchdog(1000, 0)
    assert not asked(watchdog, 0, 900)
    assert watchdog.hangs(5, True, 0, 1000 * MS)
    assert watchdog.stuck_ms(1000 * MS) == 1000
    assert not watchdog.hangs(6, True, 0, 1001 * MS)


def test_time_while_the_process_was_stopped_does_not_count() -> None:
    watchdog = Watchdog(1000, 0)
    assert not asked(watchdog, 0, 900)
    assert not asked(watchdog, 60_000, 60_000), "it could not run, so it may go on first"
    assert watchdog.paused_ms == 59_100
    assert not asked(watchdog, 60_100, 60_900)
    assert watchdog.paused_ms == 0
    assert watchdog.hangs(5, True, 0, 61_000 * MS)


def test_reading_a_large_file_is_movement_and_a_little_is_not() -> None:
    watchdog = Watchdog(1000, 0)
    assert not watchdog.hangs(5, True, 0, 0)
    for tick in range(1, 240):
        assert not watchdog.hangs(5, True, (tick // 4) << 20, tick * 225 * MS)
    watchdog = Watchdog(1000, 0)
    for tick in range(10):
        assert not watchdog.hangs(5, True, tick * 400, tick * 100 * MS)
    assert watchdog.hangs(5, True, 4096, 1000 * MS)


def test_io_is_counted(tmp_path: Path) -> None:
    before = io_bytes()
    if before == 0:
        pytest.skip("no /proc/self/io here")
    file = tmp_path / "big"
    file.write_bytes(bytes(4 << 20))
    file.read_bytes()
    assert io_bytes() - before >= 4 << 20
    assert io_bytes(tmp_path / "none") == 0


def test_giving_up_uses_the_code_that_asks_for_a_restart() -> None:
    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    with pytest.raises(Left, match=str(EXIT_HANG)):
        give_up(5, leave)  # type: ignore[arg-type]


def test_reports_on_change_and_on_the_timer() -> None:
    reporter = Reporter(sample_ms=2000)
    assert reporter.due(1, 0)
    assert not reporter.due(1, 1999 * MS)
    assert reporter.due(1, 2000 * MS)
    assert not reporter.due(2, 2010 * MS), "changes in quick succession are told together"
    assert reporter.next_ns(2, 2010 * MS) == 2050 * MS
    assert reporter.due(3, 2050 * MS)
    assert reporter.seq == 3


def test_a_new_session_is_told_at_once() -> None:
    reporter = Reporter(sample_ms=2000)
    reporter.due(1, 0)
    reporter.restart()
    assert reporter.due(1, 1)
    assert reporter.seq == 2, "numbers go on: the broker keeps the newest"


def test_a_short_period_wins_over_the_pause() -> None:
    reporter = Reporter(sample_ms=10)
    assert reporter.due(1, 0)
    assert reporter.due(2, 10 * MS)


def test_reports_that_take_long_come_more_seldom() -> None:
    reporter = Reporter(sample_ms=2000)
    assert reporter.due(0, 0)
    reporter.took(3 * MS)
    assert not reporter.due(1, 299 * MS)
    assert reporter.due(1, 300 * MS)
    reporter.took(500 * MS)
    assert not reporter.due(2, 2299 * MS)
    assert reporter.due(2, 2300 * MS)
    reporter.took(1)
    assert reporter.due(3, 2350 * MS)


def test_a_report_can_wait_but_not_for_ever() -> None:
    reporter = Reporter(sample_ms=2000)
    assert reporter.overdue(0), "none was ever made"
    assert reporter.due(1, 0, urgent=True)
    for now_ms in range(0, 2100, 50):
        assert not reporter.overdue(now_ms * MS)
    assert reporter.overdue(2100 * MS)
    assert reporter.due(1, 2100 * MS, urgent=True), "what is overdue is due, too"
    assert not reporter.overdue(2101 * MS)


def test_a_worker_that_a_library_aborts_says_where_it_was(short_tmp: Path) -> None:
    with WorkerProcess(short_tmp, f"ipc://{short_tmp}/nobody.ipc") as worker:
        until = time.monotonic() + 60
        while "serving cpu" not in worker.log:
            assert time.monotonic() < until, worker.log
            time.sleep(0.01)
        worker.process.send_signal(signal.SIGABRT)
        assert worker.process.wait(20) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in worker.log
        assert "loop.py" in worker.log
