"""Valid and invalid messages about what would fit. *Pure.*"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.fitting import Fit, FitDevice, FitReport, FitRow
from vram_conductor.protocol.messages import Ok

MIB = 1 << 20

REPORT = FitReport(
    model="smollm2-135m",
    slots=2,
    arch="llama",
    file_bytes=98_362_432,
    n_ctx_train=8192,
    devices=[
        FitDevice(
            device="cuda:0",
            mode="timeshare",
            cap_bytes=1024 * MIB,
            promised_bytes=300 * MIB,
            base_bytes=100 * MIB,
            leases_bytes=50 * MIB,
            foreign_bytes=24 * MIB,
            free_bytes=700 * MIB,
            agents=3,
            host_cap_bytes=2048 * MIB,
            host_promised_bytes=64 * MIB,
        ),
        FitDevice(device="cpu"),
    ],
    rows=[
        FitRow(
            device="cuda:0",
            kv_type="q8_0",
            n_ctx=8192,
            limit="training",
            pool_cells=16_384,
            pool_slots=2,
            weights_bytes=92 * MIB,
            kv_bytes=190 * MIB,
            compute_bytes=3 * MIB,
            recurrent_bytes=1 * MIB,
            scratch_bytes=2 * MIB,
            state_bytes=96 * MIB,
            requested_bytes=196 * MIB,
            free_bytes=504 * MIB,
            shares_weights=True,
        ),
        FitRow(
            device="cpu",
            kv_type="f16",
            error=ErrorInfo(Code.UNAVAILABLE, "no_worker", "cpu has no worker", retryable=True),
        ),
    ],
)


def requests(rid: bytes) -> dict[str, msgspec.Struct]:
    """What a client asks."""
    return {
        "fit": Fit(rid=rid, model="smollm2-135m"),
        "fit_full": Fit(rid=rid, model="/models/Modèle-00001-of-00003.gguf", device="cpu", slots=2),
    }


def answers(rid: bytes) -> dict[str, msgspec.Struct]:
    """What it is told."""
    return {"ok_fit": Ok(rid=rid, body=msgspec.to_builtins(REPORT))}


def bad_requests() -> list[tuple[str, str, dict[str, Any]]]:
    """Fields of FITs that are refused: (message, what is wrong, fields beside the rid)."""
    return [
        ("fit", "model_missing", {}),
        ("fit", "model_empty", {"model": ""}),
        ("fit", "model_newline", {"model": "a\nb"}),
        ("fit", "device_slash", {"model": "m", "device": "../cpu"}),
        ("fit", "slots_zero", {"model": "m", "slots": 0}),
        ("fit", "slots_many", {"model": "m", "slots": limits.SLOTS_MAX + 1}),
        ("fit", "slots_text", {"model": "m", "slots": "2"}),
    ]
