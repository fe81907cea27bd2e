"""Calls into llama.cpp that recurse once per character.

Many vocabularies' patterns for words run on ``std::regex``, which goes one level deeper with each
character of a word: 100,000 letters in a row overflow a stack of 8 MB, and that is a SIGSEGV.
Address space costs nothing until it is touched, so such a call gets a thread with a stack of its
own size; what was touched is given back at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from vram_conductor.protocol.errors import ResourceExhausted

LEVEL_BYTES = 1024
"""Stack for one character; 250 to 350 were measured."""

SHALLOW_CHARS = 4096
"""So many characters fit on any thread's stack."""

_BASE_BYTES = 16 * 1024 * 1024
_lock = threading.Lock()

T = TypeVar("T")


class _Call(Generic[T]):
    """One call and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self._call())
        except BaseException as error:  # handed to the thread that waits
            self.error = error


def call_deep(call: Callable[[], T], levels: int) -> T:
    """Make ``call``, which may recurse ``levels`` deep, and wait for it.

    Raises:
        ResourceExhausted: ``no_stack``: the system has no address space for it.
    """
    if levels <= SHALLOW_CHARS:
        return call()
    # In whole mebibytes: stacks are made of pages.
    stack_bytes = (_BASE_BYTES + levels * LEVEL_BYTES) & ~0xFFFFF
    made = _Call(call)
    thread = threading.Thread(target=made.run, name="deep", daemon=True)
    try:
        with _lock:
            before = threading.stack_size(stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
    except (RuntimeError, ValueError):
        raise ResourceExhausted(
            "no_stack",
            f"tokenising {levels} characters needs {stack_bytes} bytes of stack and the system "
            "does not give them; send less text at once",
            characters=levels,
            stack_bytes=stack_bytes,
        ) from None
    thread.join()
    if made.error is not None:
        raise made.error
    return made.result[0]
