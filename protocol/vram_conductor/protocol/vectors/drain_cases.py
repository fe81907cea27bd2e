"""Valid messages about replacing a device's worker. *Pure.*"""

from __future__ import annotations

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.drain import DrainDevice, DrainReceipt
from vram_conductor.protocol.messages import Ok

_EPOCH = 1_700_000_000_000_000_000
_RECEIPT = DrainReceipt(
    device="cpu",
    worker="cpu@box",
    worker_epoch=_EPOCH,
    pid=4242,
    host="box",
    version="0.1.0",
    build="llama-cpp-python-0.3.16+0123abcd",
    finished=2,
    cut_off=1,
    waiting=3,
    ms=1500,
)


def requests(rid: bytes) -> dict[str, msgspec.Struct]:
    """What an operator asks."""
    return {
        "drain_device": DrainDevice(rid=rid, device="cpu"),
        "drain_device_full": DrainDevice(
            rid=rid, device="cuda:0", worker_epoch=_EPOCH, drain_ms=0, hold_ms=limits.TIME_MS_MAX
        ),
    }


def answers(rid: bytes) -> dict[str, msgspec.Struct]:
    """What he is told."""
    return {"ok_drain": Ok(rid=rid, body=msgspec.to_builtins(_RECEIPT))}
