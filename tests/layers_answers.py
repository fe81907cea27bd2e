"""What the worker's side says of a model whose layers travel, made up."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20

GIB = 1 << 30


def memory(grown: int | None = None) -> dict[str, Any]:
    return {
        "window_bytes": 200 * MIB,
        "resident_bytes": 0,
        "kv_bytes": 64 * MIB,
        "activation_bytes": 36 * MIB,
        "streamed_bytes": 4 * GIB,
        "counted_bytes": 300 * MIB,
        "grown_bytes": grown,
    }


def layers(rates: dict[int, float], grown: int | None = 310 * MIB) -> dict[str, Any]:
    """An answer: batch → tokens/s; a pass could take 80 ms. C is T at a batch of 16."""
    agreement = {
        "cosine": 0.9996,
        "cosine_least": 0.9995,
        "cosine_median": 0.9999,
        "top1_share": 0.99,
        "positions": 256,
        "greedy_equal": 32,
        "greedy_tokens": 32,
    }
    span = {"stream": "compute", "unit": 0, "start_ms": 0.0, "end_ms": 1.0, "at_pass": 0}
    return {
        "setting": {"n_ctx": 256},
        "device_name": "a GPU",
        "base_bytes": 500 * MIB,
        "model": {"pass_bytes": 4 * GIB, "random": False},
        "rates": {"h2d_gb_s": 55.0},
        "agreement": {
            "text": True,
            "same": agreement | {"cosine_least": 0.99},
            "itself": agreement | {"top1_share": 0.93, "greedy_equal": 17},
            "without": agreement | {"cosine": 0.93},
            "without_layer": 15,
            "copy": agreement,
            "copy_itself": agreement | {"cosine_least": 0.98765},
        },
        "prefill": {
            "tokens": 512,
            "serial_ms": [160.0, 150.0, 170.0],
            "single_ms": [110.0],
            "overlapped_ms": [100.0, 90.0, 110.0],
            "transfer_ms": 80.0,
            "compute_ms": 70.0,
            "bound": 1.875,
            "memory": memory(grown),
            "serial_spans": [span],
            "overlapped_spans": [span],
        },
        "decode": [decode(batch, rate, grown) for batch, rate in rates.items()],
        "without_resident": None,
        "phases": {"prefill": 2.0},
        "notes": [],
    }


def decode(batch: int, rate: float, grown: int | None = None) -> dict[str, Any]:
    return {
        "batch": batch,
        "step_ms": [1e3 * batch / rate],
        "logits_ms": [1e3 * batch / rate],
        "serial_ms": [2e3 * batch / rate],
        "transfer_ms": 80.0,
        "compute_ms": 5.0 * batch,
        "bound_ms": 80.0,
        "own_bytes": 300 * MIB,
        "memory": memory(grown),
    }
