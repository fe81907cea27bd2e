"""The demo: three agents, a budget that holds one model's pool; every claim is checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from vram_conductor.client.demo_acts import Acts
from vram_conductor.client.demo_models import DemoModel, cast, giant, places, prepare
from vram_conductor.client.output import Output
from vram_conductor.client.receipts import Receipts
from vram_conductor.client.stage import Stage, StageDevice
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size, table

SLACK_BYTES = 8 << 20
"""What the budget holds beyond all weights and the largest pool: less than any pool."""

_HOST_BYTES = 512 << 20


def run_demo(
    output: Output, *, gemma: bool, original: bool, receipts: Receipts | None = None
) -> int:
    """Run it, with two models or the original's three; exit status 0 if every claim held."""
    began = time.monotonic()
    receipts = receipts or Receipts(output)
    receipts.heading("models")
    with output.waiting("preparing the models"):
        models = prepare(output, receipts.say, gemma=gemma, original=original)
    room = max(model.pool_bytes for model in models) + SLACK_BYTES
    budget = sum(model.weights_bytes for model in models) + room
    separate_bytes = _separate(receipts, models, budget)
    device = StageDevice(capacity_bytes=budget, host_cap_bytes=_HOST_BYTES)
    stage = Stage([device], worker=places(models), say=receipts.say)
    # Whatever goes wrong from here on, somebody will want to read the log.
    stage.keep = True
    try:
        with stage, Conductor(stage.endpoint, client="demo") as conductor:
            acts = Acts(stage, conductor, receipts, cast(models), giant(models, room), budget)
            acts.run(separate_bytes, output)
            stage.keep = bool(receipts.failed)
    except KeyboardInterrupt:
        stage.keep = False
        stage.stop()
        raise
    finally:
        if stage.keep:
            output.news(f"\nthe log and the configuration are kept in {stage.folder}")
    return _close(output, receipts, stage, time.monotonic() - began)


def _close(output: Output, receipts: Receipts, stage: Stage, took_s: float) -> int:
    receipts.heading(f"receipts ({duration(1000 * took_s)})")
    output.text(receipts.closing(output.width))
    held = len(receipts.all) - receipts.failed
    output.text(f"\n{held} of {len(receipts.all)} claims hold")
    output.value(
        {
            "passed": not receipts.failed,
            "seconds": round(took_s, 3),
            "receipts": [vars(receipt) for receipt in receipts.all],
            "kept": str(stage.folder) if stage.keep else None,
        }
    )
    return 1 if receipts.failed else 0


def _separate(receipts: Receipts, models: Sequence[DemoModel], budget: int) -> int:
    """What three processes of their own would reserve, and who would not fit."""
    receipts.heading(f"without a conductor: three processes, {size(budget)} for all")
    total = 0
    rows: list[list[str]] = []
    for agent, model in cast(models):
        own = model.weights_bytes + model.pool_bytes
        total += own
        verdict = "fits" if total <= budget else f"out of memory, short by {size(total - budget)}"
        rows.append([agent, Path(model.name).name, size(own), size(total), verdict])
    header = ["process", "model", "weights + KV + compute", "sum", ""]
    receipts.say(table(header, rows, right=(2, 3)))
    return total
