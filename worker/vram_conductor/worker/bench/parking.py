"""What parking and resuming one conversation takes (``python -m …worker.bench.parking MODEL``).

As in the product: a pool's sequence goes into the arena's own memory and comes back from there.
Medians in milliseconds, GB/s are 1e9 bytes per second. On cuda a conversation's first states are
parked in pageable memory, later ones in pinned memory, and both are told. With the preload library
(``gathered``) a state's pieces are copied together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vram_conductor.protocol.errors import Internal
from vram_conductor.protocol.values import ConversationKey, PoolShape
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.pin_cuda import CudaPinner
from vram_conductor.worker.pinning import Pinning
from vram_conductor.worker.store import ParkedMeta

T = TypeVar("T")

STATE_BYTES = 128 << 20
REPEATS = 9
TURN_TOKENS = 200
"""Tokens that two slots generate side by side, for :meth:`Bed.side_by_side`."""

PATIENCE_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
_KEY = ConversationKey("bench", "agent", "main")


class Bed:
    """A model, a pool of two slots, and a store."""

    def __init__(self, model_path: Path, device: str, state_bytes: int, stack: ExitStack) -> None:
        kind, _, index = device.partition(":")
        cuda = kind == "cuda"
        options = EngineOptions(
            device_kind="cuda" if cuda else "cpu", device_index=int(index or 0) if cuda else 0
        )
        engine = open_engine(options)
        stack.callback(engine.close)
        self.gathered = engine.mechanism == "vmm-sleep"
        self.pinning = Pinning(1 << 40, CudaPinner(options.device_index)) if cuda else Pinning()
        stack.callback(self.pinning.close)
        self.model = engine.load(str(model_path), "bench")
        stack.callback(self.model.close)
        self.tokens, cells = self._size(state_bytes, options.batch_tokens)
        self.pool = self.model.open_pool(PoolShape(cells, 2))
        stack.callback(self.pool.close)
        self._batch_tokens = options.batch_tokens
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared)))
        self.store = KVStore(ArenaDir(folder / "arenas", device), 1 << 40, pinning=self.pinning)
        stack.callback(self.store.close)

    def _size(self, state_bytes: int, batch_tokens: int) -> tuple[int, int]:
        """Tokens whose state has about that many bytes, and cells for twice as many."""
        probe = self.model.open_pool(PoolShape(256, 1))
        try:
            probe.decode([(0, random_ids(min(64, batch_tokens)), 0, True)])
            per_token = max(1, probe.state_bytes(0) // min(64, batch_tokens))
        finally:
            probe.close()
        tokens = max(64, state_bytes // per_token)
        return tokens, -(-(2 * tokens + 4 * TURN_TOKENS) // 256) * 256

    def fill(self, slot: int, tokens: int) -> None:
        """Let an empty slot hold ``tokens`` tokens."""
        self.pool.truncate(slot, 0)
        ids = random_ids(tokens)
        for at in range(0, tokens, self._batch_tokens):
            part = ids[at : at + self._batch_tokens]
            self.pool.decode([(slot, part, at, at + len(part) == tokens)])

    def park(self, slot: int) -> dict[str, float]:
        """One park: bytes, milliseconds by step, whether the memory was pinned."""
        watch = Watch()
        size = watch("size_ms", lambda: self.pool.state_bytes(slot))
        view = watch("writer_ms", lambda: self.store.writer(_KEY, size, 2 * size))
        with view:
            written = watch("get_ms", lambda: self.pool.get_state(slot, view))
        meta = ParkedMeta(_KEY, "bench", "bench", "f16", "", 0, 0, written)
        watch("commit_ms", lambda: self.store.commit(meta))
        return watch.done(written)

    def resume(self, slot: int) -> dict[str, float]:
        """Bring the parked state back into a slot."""
        watch = Watch()
        found = watch("read_ms", lambda: self.store.read(_KEY))
        if found is None:
            raise Internal("bench_failed", "the parked state is gone")
        with found[1] as view:
            watch("set_ms", lambda: self.pool.set_state(slot, view))
        return watch.done(found[0].payload_bytes)

    def settle(self) -> None:
        """Wait until what was parked is pinned, where anything is."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.pinning.active and not self.store.pinned(_KEY):
            if time.monotonic() > deadline_s:
                raise Internal("bench_failed", f"never pinned: {self.pinning.figures()}")
            time.sleep(0.001)

    def side_by_side(self, tokens: int) -> None:
        """Both slots generate in the same batches, as two agents of one model do: their cells
        take turns."""
        last = [self.pool.pos_max(slot) for slot in (0, 1)]
        for _ in range(tokens):
            last = [position + 1 for position in last]
            self.pool.decode([(slot, random_ids(1), last[slot], True) for slot in (0, 1)])


class Watch:
    """Times steps, and all of them together."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._steps: dict[str, float] = {}

    def __call__(self, name: str, step: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = step()
        self._steps[name] = (time.perf_counter() - began) * 1e3
        return result

    def done(self, n_bytes: int) -> dict[str, float]:
        """All steps, ``ms`` from the first to the last, ``bytes``."""
        return self._steps | {"ms": (time.perf_counter() - self._began) * 1e3, "bytes": n_bytes}


def random_ids(n: int) -> Tokens:
    """Ids that every bench model has and none treats as special."""
    return np.random.default_rng(n).integers(0, 256, n).astype(np.int32)


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure, with the rate of the whole and of its copy alone."""
    found = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    copy_ms = found.get("get_ms", found.get("set_ms", found["ms"]))
    found["gb_s"] = found["bytes"] / found["ms"] / 1e6
    found["copy_gb_s"] = found["bytes"] / copy_ms / 1e6
    return {name: round(value, 3) for name, value in found.items()}


def measure(
    model_path: Path, device: str, state_bytes: int = STATE_BYTES, repeats: int = REPEATS
) -> dict[str, Any]:
    """Everything; see the module's docstring."""
    with ExitStack() as stack:
        bed = Bed(model_path, device, state_bytes, stack)
        bed.fill(0, bed.tokens)
        first = medians([bed.park(0)])
        first_back = medians([bed.resume(1)])
        bed.park(0)
        began = time.perf_counter()
        bed.settle()
        pin_s = time.perf_counter() - began
        bed.park(0)
        bed.settle()
        parks = [bed.park(0) for _ in range(repeats)]
        bed.settle()
        resumes = [bed.resume(1) for _ in range(repeats)]
        found: dict[str, Any] = {
            "device": device,
            "tokens": bed.tokens,
            "gathered": bed.gathered,
            "spans": bed.pinning.spans,
            "pinned": bed.store.pinned(_KEY),
            "first_park": first,
            "pinned_after_ms": round(pin_s * 1e3, 3),
            "first_resume": first_back,
            "park": medians(parks),
            "resume": medians(resumes),
        }
        return found | {"side_by_side": _side_by_side(bed)}


def _side_by_side(bed: Bed) -> dict[str, Any]:
    """The same for a conversation whose last cells lie between another one's."""
    for slot in (0, 1):
        bed.fill(slot, max(64, bed.tokens // 8))
    whole = medians([bed.park(0)])
    bed.side_by_side(TURN_TOKENS)
    bed.park(0)
    bed.settle()
    scattered = medians([bed.park(0)])
    bed.settle()
    back = medians([bed.resume(0)])
    again = medians([bed.park(0)])
    return {
        "tokens": TURN_TOKENS,
        "park_before": whole,
        "park": scattered,
        "resume": back,
        "park_after_resume": again,
    }


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(prog="vram_conductor.worker.bench.parking")
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bytes", type=int, default=STATE_BYTES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    found = measure(args.model, args.device, args.bytes, args.repeats)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
