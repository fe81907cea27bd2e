"""Scenes of ``test_lanes_gpu.py``, each in a process with the preload library:
``python lanes_scenes.py NAME FOLDER``. The last line that a scene prints is its figures.

Here lanes of a core compute on the GPU, in this very process: at once, and beside moves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from real_driver import RealDriver
from residency_scenes import Stage  # type: ignore[import-not-found]

from vram_conductor.worker.bench.random_models import make_random

SIZES = ("0.36B", "0.5B", "1.2B")
SWITCH_S = 0.0005
"""As in the worker."""


def prompt(index: int) -> list[int]:
    return [8 + (index * 37 + item * 11) % 240 for item in range(64)]


def ids_of(driver: RealDriver, names: list[str], n: int, *, at_once: bool) -> dict[str, Any]:
    """Every model says ``n`` tokens, at once or in turn: what, and how fast all together."""
    ids: dict[str, list[int]] = {}
    begin = time.perf_counter()
    ops: dict[str, int] = {}
    for index, name in enumerate(names):
        ops[name] = driver.run(name, tokens=prompt(index), max_tokens=n)
        if not at_once:
            driver.finish(ops[name])
    driver.finish(*ops.values())
    took_s = time.perf_counter() - begin
    for name, op in ops.items():
        ids[name] = driver.attempts[op].ids
        driver.forget(name)
    return {"ids": ids, "tokens_s": round(len(names) * n / took_s, 1)}


def beside(driver: RealDriver, names: list[str], n: int) -> dict[str, Any]:
    """The first model streams; the others take turns in what room is left, without a pause. Its
    rate then, as a share of its rate alone."""
    stream, *others = names

    def streamed(meanwhile: Callable[[], None]) -> tuple[list[int], float, list[float]]:
        begin = last = time.perf_counter()
        op = driver.run(stream, tokens=prompt(0), max_tokens=n)
        gaps: list[float] = []
        seen = 0
        while not driver.attempts[op].end:
            meanwhile()
            driver.step()
            if len(driver.attempts[op].ids) > seen:
                seen, now = len(driver.attempts[op].ids), time.perf_counter()
                gaps.append((now - last) * 1e3)
                last = now
        took_s = time.perf_counter() - begin
        ids = driver.attempts[op].ids
        driver.forget(stream)
        return ids, len(ids) / took_s, sorted(gaps)

    running = dict.fromkeys(others, 0)
    turns = 0

    def go_on() -> None:
        nonlocal turns
        for name, op in running.items():
            if not op or driver.attempts[op].end:
                turns += 1
                running[name] = driver.run(
                    name, tokens=prompt(turns)[:5], continue_=turns % 40 > 1, max_tokens=1
                )

    alone = streamed(lambda: None)
    before = driver.core.switches
    busy = streamed(go_on)
    driver.finish(*running.values())
    return {
        "same": alone[0] == busy[0],
        "alone_tokens_s": round(alone[1], 1),
        "share": round(busy[1] / alone[1], 3),
        "p95_ms": round(busy[2][int(len(busy[2]) * 0.95)], 2),
        "switches": driver.core.switches - before,
    }


def where(driver: RealDriver, name: str, n: int) -> dict[str, float]:
    """Where the time of one stream goes, by token, in us: computing, sampling, and all the rest
    (waiting for the interpreter, and between two threads)."""
    handle = driver.core.residency.pools[f"{driver.identity(name)}@f16"].handle
    assert handle is not None
    marks: list[tuple[float, float, float]] = []
    decode, sample, begun = handle.decode, handle.sample, [0.0, 0.0]

    def timed_decode(batch: Any) -> None:
        begin = time.perf_counter()
        decode(batch)
        begun[:] = begin, time.perf_counter()

    def timed_sample(slot: int, sampler: Any) -> int:
        begin = time.perf_counter()
        token = sample(slot, sampler)
        marks.append((begun[0], begun[1], time.perf_counter() - begin + begun[1]))
        return token

    handle.decode, handle.sample = timed_decode, timed_sample  # type: ignore[method-assign]
    driver.finish(driver.run(name, tokens=prompt(0), max_tokens=n))
    driver.forget(name)
    handle.decode, handle.sample = decode, sample  # type: ignore[method-assign]
    tokens = list(pairwise(marks[1:]))
    return {
        "decode_us": round(median(end - begin for begin, end, _ in marks[1:]) * 1e6, 1),
        "sample_us": round(median(done - end for _, end, done in marks[1:]) * 1e6, 1),
        "rest_us": round(median(after[0] - before[2] for before, after in tokens) * 1e6, 1),
    }


def together(folder: str, n: str = "400") -> dict[str, Any]:
    """Three models, on one thread in turn and on lanes at once."""
    sys.setswitchinterval(SWITCH_S)
    files = {name: make_random(name, Path(folder)) for name in SIZES}
    found: dict[str, Any] = {}
    for lanes in ("inline", "free"):
        stage = Stage(files, 2048, lanes)
        driver = stage.driver(tight=False)
        ids_of(driver, list(files), 8, at_once=True)  # kernels are loaded
        for at_once in (False, True):
            name = f"{lanes}, {'at once' if at_once else 'in turn'}"
            found[name] = ids_of(driver, list(files), int(n), at_once=at_once)
        found[f"{lanes}, by token"] = {name: where(driver, name, int(n)) for name in files}
        driver.leave()
        driver.lanes.close()
        stage.close()
    said = [item.pop("ids") for item in found.values() if "ids" in item]
    return {"same": all(ids == said[0] for ids in said), **found}


def stream(folder: str, n: str = "1500") -> dict[str, Any]:
    """One model streams while two others switch in the room that is left."""
    sys.setswitchinterval(SWITCH_S)
    files = {name: make_random(name, Path(folder)) for name in SIZES}
    stage = Stage(files, 2048, "free")
    driver = stage.driver(tight=False)
    ids_of(driver, list(files), 8, at_once=True)
    residency = driver.core.residency
    weights = {name: residency.weights[driver.identity(name)] for name in files}
    pools = {pool.weights.model: pool.open_bytes for pool in residency.pools.values()}
    whole = {name: item.bytes + pools[item.model] for name, item in weights.items()}
    scratch = sum(item.scratch_bytes for item in weights.values())
    first, *others = files
    room = stage.base_bytes + scratch + whole[first] + max(whole[name] for name in others)
    driver.budget(room)
    found = beside(driver, list(files), int(n))
    driver.leave()
    driver.lanes.close()
    stage.close()
    return found


SCENES: dict[str, Callable[..., dict[str, Any]]] = {"together": together, "stream": stream}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(SCENES[sys.argv[1]](*sys.argv[2:])) + "\n")
