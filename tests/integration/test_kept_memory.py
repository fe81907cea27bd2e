"""Unloaded, and still on the card: verified by measurement, and the worker is replaced (F2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_models import Spec
from hoards import ENDS, RESTS, unloaded_and_still_there, wear_sooner
from scene import MIB, Scene, model, some_tokens

from vram_conductor.client.stage import StageDevice

WORDS = [some_tokens(40, seed) for seed in (1, 2, 3)]
MODELS = {
    RESTS: Spec(vocab="bytes", n_ctx_train=16_384),
    # 32 KiB per token.
    ENDS: Spec(vocab="bytes", n_layer=16, n_embd=512, n_head=4, n_head_kv=4, n_ctx_train=8192),
}


@pytest.mark.parametrize("tells", ["1", "0"], ids=["by process", "by difference"])
def test_what_is_unloaded_and_still_in_use_costs_a_worker_and_no_conversation(
    tells: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = short_tmp / "hoard"
    wear_sooner(monkeypatch, HOARD_FILE=str(file), HOARD_TELLS=tells)
    device = StageDevice(
        "cuda:0", capacity_bytes=420 * MIB, host_cap_bytes=1024 * MIB, kind="cuda", sleep="off"
    )
    with Scene(device, worker="sample_ms = 100") as scene:
        unloaded_and_still_there(
            scene,
            device.id,
            {agent: model(spec) for agent, spec in MODELS.items()},
            {RESTS: 16_384, ENDS: 6144},
            WORDS,
            lambda: file.write_text(str(scene.worker_pid(device.id))),
            lambda: None,
        )
