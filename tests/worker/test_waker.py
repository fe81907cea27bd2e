"""Threads that stay for the next wake."""

from __future__ import annotations

import threading

from vram_conductor.worker.waker import Wakers


def test_what_was_begun_runs_at_once_and_is_waited_for() -> None:
    wakers, both = Wakers(), threading.Barrier(2, timeout=20)
    done: list[int] = []

    def work() -> None:
        both.wait()
        done.append(1)

    for _ in range(2):
        wakers.begin(work)
    wakers.join()
    assert done == [1, 1]
    wakers.join()


def test_a_thread_is_used_again() -> None:
    wakers = Wakers()
    threads: list[threading.Thread] = []
    for _ in range(5):
        wakers.begin(lambda: threads.append(threading.current_thread()))
        wakers.join()
    assert len(set(threads)) == 1
