"""A worker whose sockets are open and whose engine does not come back from llama.cpp: health
follows the work loop, so it is replaced, and who talked to it goes on (case F5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_models import Spec
from scene import MIB, WAIT_S, Scene, model, some_tokens, until
from watched_library import WatchedLibrary

from vram_conductor.client.stage import StageDevice

WORDS = [some_tokens(40, seed) for seed in (1, 2)]
HANG_MS = 4000


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_an_engine_that_hangs_is_noticed_and_replaced(
    lanes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = WatchedLibrary(tmp_path, monkeypatch)
    device = StageDevice(capacity_bytes=128 * MIB, host_cap_bytes=64 * MIB)
    with Scene(device, worker=f'lanes = "{lanes}"\nhang_ms = {HANG_MS}') as scene:
        scene.conductor.register("a", model(Spec(vocab="bytes")), n_ctx=1024)
        expected = scene.run("a", WORDS[0], conversation="well", max_tokens=30).ids
        scene.run("a", WORDS[0], max_tokens=4)
        hung = scene.worker_pid()
        with library.stuck(hung):
            # Nobody has seen a token of it: the next worker does it from the start.
            unseen = scene.start("a", WORDS[0], conversation="unseen", max_tokens=30)
            until(lambda: library.events("stuck"), "the engine is in there")
            # Its connection is as alive as ever; the broker answers at once.
            assert scene.worker_pid() == hung
            assert unseen.result(WAIT_S).ids == expected
            assert scene.worker_pid() != hung
        # What was parked before is still of use.
        usage = scene.run("a", WORDS[1], max_tokens=4).usage
        assert (usage.state_version, usage.reprefilled_tokens) == (2, 0)
