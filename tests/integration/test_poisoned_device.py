"""A device that answers every call with an error: the worker is replaced, and all goes on (F4)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf_models import Spec
from scene import MIB, WAIT_S, Scene, model, some_tokens, until

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import ConductorError

FOLDER = Path(__file__).parent.parent / "poisoned"
WORDS = [some_tokens(40, seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_a_worker_on_a_poisoned_device_is_replaced_and_its_agents_are_back(
    lanes: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = short_tmp / "poison"
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *filter(None, [path])]))
    monkeypatch.setenv("POISON_FILE", str(file))
    device = StageDevice(capacity_bytes=128 * MIB, host_cap_bytes=64 * MIB)
    with Scene(device, worker=f'lanes = "{lanes}"') as scene:
        scene.conductor.register("a", model(Spec(vocab="bytes")), n_ctx=1024)
        expected = [scene.run("a", words, conversation="well", max_tokens=4).ids for words in WORDS]
        scene.run("a", WORDS[0], conversation="main", max_tokens=4)
        sick = scene.worker_pid()
        file.write_text(str(sick))

        reasons: list[str] = []

        def tried() -> bool:
            try:
                answer = scene.run("a", WORDS[1], conversation="main", max_tokens=4)
            except ConductorError as error:
                reasons.append(error.reason)
                return False
            assert answer.ids == expected[1]
            # What was parked before is still of use.
            assert answer.usage.reused_tokens == len(WORDS[0]) + 3
            assert answer.usage.reprefilled_tokens == 0
            return True

        until(tried, "the conversation goes on", WAIT_S)
        assert scene.worker_pid() != sick
        # Two jobs at the most have to fail before it is clear that they are not to blame.
        assert set(reasons) <= {"decode_failed", "worker_lost", "worker_away"}
        assert reasons.count("decode_failed") <= 2
        assert scene.run("a", WORDS[2], conversation="main", max_tokens=4).ids == expected[2]
