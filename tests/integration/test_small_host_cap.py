"""Main memory for parked states is capped: what is parked stays below, whatever is asked for."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gguf_models import Spec
from scene import MIB, Scene, model, refusal, some_tokens

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import LEDGER_DENY

SPEC = Spec(vocab="bytes", seed=76, n_ctx_train=16_384)
HOST_CAP = 3 * MIB
CONVERSATIONS = 12
TURNS = 2


class Watch:
    """The most that parked states took, as the file system and the kernel tell it.

    Attributes:
        files_bytes: memory of the arenas' files.
        mapped_bytes: shared memory that the worker has mapped.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.files_bytes = self.mapped_bytes = 0
        self._folder, self._pid = folder, pid

    def look(self) -> None:
        blocks = 0
        for path in self._folder.rglob("*.kv*"):
            try:
                blocks += path.stat().st_blocks
            except FileNotFoundError:
                continue
        self.files_bytes = max(self.files_bytes, blocks * 512)
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                self.mapped_bytes = max(self.mapped_bytes, int(line.split()[1]) * 1024)


@contextmanager
def watched(scene: Scene) -> Generator[Watch]:
    """Looks all the time."""
    watch, stop = Watch(scene.stage.arena_dir, scene.worker_pid()), threading.Event()

    def go_on() -> None:
        while not stop.wait(0.001):
            watch.look()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def test_more_conversations_than_fit_stay_below_the_cap_and_go_on() -> None:
    """Case C6: the size is looked at first, and the process is never killed for its memory."""
    device = StageDevice(capacity_bytes=64 * MIB, host_cap_bytes=HOST_CAP)
    with Scene(device) as scene:
        info = refusal(lambda: scene.conductor.register("giant", model(SPEC), n_ctx=16_384))
        assert info.reason == LEDGER_DENY
        assert "host" in info.message, "one state larger than the cap is refused with the numbers"
        scene.conductor.register("agent", model(SPEC), n_ctx=1024)
        worker = scene.worker_pid()
        said: dict[int, list[int]] = {}
        with watched(scene) as watch:
            for turn in range(TURNS):
                for number in range(CONVERSATIONS):
                    ids = some_tokens(500 if turn == 0 else 5, number)
                    result = scene.run("agent", ids, conversation=f"c{number}", max_tokens=4)
                    said.setdefault(number, []).extend([*ids, *result.ids])
        parked = list(scene.stage.arena_dir.rglob("*.kv"))
        assert 0 < len(parked) < CONVERSATIONS, "not all of them fitted"
        assert 0.5 * HOST_CAP < watch.files_bytes <= HOST_CAP
        assert watch.mapped_bytes <= HOST_CAP
        assert scene.worker_pid() == worker
        # The first conversation was given up and computed again: the same tokens all the same.
        last = scene.run("agent", [7], conversation="c0", max_tokens=6).ids
        whole = scene.run("agent", [*said[0], 7], conversation="whole", max_tokens=6).ids
        assert last == whole
