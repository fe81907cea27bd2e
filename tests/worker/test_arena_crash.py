"""kill -9 while states are being parked: what is left is whole, always.

Run as a script, this file is the process that parks and gets killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.arena_dir import ArenaDir, arena_name
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.store import ParkedMeta

KILLS = 60
SEED = 20240607
KEYS = [ConversationKey("local", "agent", f"c{index}") for index in range(3)]
CAP_BYTES = 64 * 1024 * 1024


def pattern(stamp: int, size: int) -> bytes:
    """Payload number ``stamp``: every 8 bytes carry it, so a mixture of two is seen."""
    return np.full(size // 8 + 1, stamp, dtype=np.uint64).tobytes()[:size]


def write_for_ever(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = KVStore(ArenaDir(folder, "cpu"), CAP_BYTES)
    stamp = seed * 1_000_000
    while True:
        stamp += 1
        key = rng.choice(KEYS)
        size = rng.randrange(1, 400_000)
        # Sometimes the state outgrows its arena, which makes a new file take its place.
        with store.writer(key, size, rng.choice([1, 200_000])) as view:
            view[:] = pattern(stamp, size)
        store.commit(ParkedMeta(key, "model", "build", "f16", "", stamp, stamp % 1000, size))
        if rng.random() < 0.5:
            # All is sealed then, however slow the sealing thread is beside this one.
            store.close()
            store = KVStore(ArenaDir(folder, "cpu"), CAP_BYTES)


def main() -> None:
    """The writing process: for every line read, fork a child that writes until it is killed.

    It has no threads of its own, so forking is safe; a fresh interpreter per kill would only be
    slower.
    """
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    for _ in sys.stdin:
        seed += 1
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(folder, seed)
            finally:
                os._exit(1)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write("dead\n" if os.WIFSIGNALED(status) else "failed\n")
        sys.stdout.flush()


def check_newest(folder: ArenaDir) -> int:
    """Every arena's last committed state is whole, sealed or not; returns how many there are."""
    whole = 0
    for key in KEYS:
        if arena_name(key) not in folder.names():
            continue
        arena = Arena.open(folder.fd, arena_name(key), sealed_only=False)
        meta = arena.meta
        assert meta is not None, "an arena gets its name when its first state is whole"
        with arena.payload() as payload:
            assert bytes(payload) == pattern(meta.tokens_hash, meta.payload_bytes)
        arena.close()
        whole += 1
    return whole


def test_a_killed_writer_leaves_whole_states(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    writer = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path / "arenas"), str(SEED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    whole = adopted = 0
    try:
        for _ in range(KILLS):
            writer.stdin.write("\n")
            writer.stdin.flush()
            victim = int(writer.stdout.readline())
            time.sleep(rng.random() * 0.04)  # The instant of the kill is the point of the test.
            os.kill(victim, signal.SIGKILL)
            assert writer.stdout.readline().strip() == "dead"
            folder = ArenaDir(tmp_path / "arenas", "cpu")
            whole += check_newest(folder)
            store = KVStore(folder, CAP_BYTES)
            for key in [key for key in KEYS if store.meta(key)]:
                state = store.read(key)
                assert state is not None
                meta, payload = state
                with payload:
                    assert bytes(payload) == pattern(meta.tokens_hash, meta.payload_bytes)
                adopted += 1
            store.close()
            assert not list(folder.path.glob("*.new"))
    finally:
        writer.stdin.close()
        writer.wait(10)
        writer.stdout.close()
    assert whole > KILLS, "the kills came too early to prove anything"
    assert adopted > whole // 2, (SEED, whole, adopted)


if __name__ == "__main__":
    main()
