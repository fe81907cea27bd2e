"""Loaded by every interpreter that finds this folder on its path: writes down what a worker does
with llama.cpp's objects.

``WATCH_FOLDER``: where. One file per process, a JSON object per line: loads as they begin and end,
weights and contexts as they are freed, and every call that meets another thread in the same
object. While a file ``hold`` lies there, a load does not begin; while there is one ``stuck`` with
the process's own number in it, a batch does not come back.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.005

CONTEXT_CALLS = (
    "llama_decode",
    "llama_free",
    "llama_get_logits_ith",
    "llama_get_memory",
    "llama_memory_clear",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_rm",
    "llama_sampler_accept",
    "llama_sampler_apply",
    "llama_sampler_free",
    "llama_sampler_sample",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
    "llama_synchronize",
)
"""Calls that use a context, its memory or a sampler: the first argument, of sampling the second,
too. Vocabularies may be read by several threads."""


def address(item: Any) -> int:
    """Where a pointer points, whether it is a plain one or has a type."""
    return item if isinstance(item, int) else ctypes.addressof(item.contents)


class Watch:
    """Who is in which object, and the file that it is written to."""

    def __init__(self, folder: Path) -> None:
        self._hold, self._stuck = folder / "hold", folder / "stuck"
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._lock = threading.Lock()
        self._inside: dict[int, tuple[int, str]] = {}
        self._context_of: dict[int, int] = {}
        self._users: dict[int, set[int]] = {}

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def calling(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``plain``, noted while it lasts."""

        @functools.wraps(plain)
        def call(*arguments: Any) -> Any:
            objects = arguments[: 2 if name == "llama_sampler_sample" else 1]
            mine = self._enter([address(item) for item in objects], name)
            try:
                result = plain(*arguments)
            finally:
                self._leave(mine, freed=name in ("llama_free", "llama_sampler_free"))
            if name == "llama_get_memory" and isinstance(result, int):
                self._context_of[result] = mine[0]
            return result

        return call

    def _enter(self, objects: list[int], name: str) -> list[int]:
        me = threading.get_ident()
        with self._lock:
            objects = [self._context_of.get(item, item) for item in objects]
            for item in objects:
                other, where = self._inside.get(item, (me, ""))
                if other != me:
                    self.write(event="clash", call=name, meets=where)
                self._inside[item] = me, name
                self._users.setdefault(item, set()).add(me)
        return objects

    def _leave(self, objects: list[int], *, freed: bool) -> None:
        with self._lock:
            for item in objects:
                self._inside.pop(item, None)
                if freed:
                    self.write(event="closed", threads=len(self._users.pop(item)))

    def decoding(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def decode(*arguments: Any) -> Any:
            if self._is_stuck():
                self.write(event="stuck")
            while self._is_stuck():
                threading.Event().wait(POLL_S)
            return plain(*arguments)

        return decode

    def _is_stuck(self) -> bool:
        return self._stuck.exists() and self._stuck.read_text() == str(os.getpid())

    def loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def load(path: bytes, *arguments: Any) -> Any:
            self.write(event="load", path=os.fsdecode(path))
            while self._hold.exists():
                threading.Event().wait(POLL_S)
            model = plain(path, *arguments)
            self.write(event="loaded", path=os.fsdecode(path), model=model or 0)
            return model

        return load

    def freeing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def free(model: int) -> Any:
            result = plain(model)
            self.write(event="freed", model=model)
            return result

        return free

    def opening(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def open_(model: int, *arguments: Any) -> Any:
            context = plain(model, *arguments)
            self.write(event="opened", model=model, context=context or 0)
            return context

        return open_


def watch(folder: Path) -> None:
    from llama_cpp import llama_cpp as library

    seen = Watch(folder)
    for name in CONTEXT_CALLS:
        setattr(library, name, seen.calling(getattr(library, name), name))
    for name, wrap in (
        ("llama_decode", seen.decoding),
        ("llama_model_load_from_file", seen.loading),
        ("llama_model_free", seen.freeing),
        ("llama_init_from_model", seen.opening),
    ):
        setattr(library, name, wrap(getattr(library, name)))


if "vram_conductor.worker" in sys.orig_argv and "WATCH_FOLDER" in os.environ:
    watch(Path(os.environ["WATCH_FOLDER"]))
