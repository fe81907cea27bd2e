"""``bench switch``: what it costs to give the device to another agent, and what it costs others."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import Setting, ask_worker
from vram_conductor.client.bench_sizes import survey
from vram_conductor.client.bench_switch_beside import beside
from vram_conductor.client.bench_switch_kv import kv
from vram_conductor.client.bench_switch_scene import (
    N_CTX,
    Switching,
    cast_full,
    cast_one,
    cast_two,
)
from vram_conductor.client.bench_switch_turns import prefetched, turns
from vram_conductor.client.bench_switch_wakes import wakes
from vram_conductor.protocol.errors import ConductorError


def measure(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """All parts; one that fails is reported, and the next one runs.

    Raises:
        InvalidArgument: ``too_few_models``.
        ConductorError: not even the sizes could be found out.
    """
    setting.need(3)
    third, small, large = setting.models[-3:]
    say("what the hardware copies")
    size = [] if setting.on_cuda else ["--bytes", str(32 << 20)]
    reference = ask_worker("rates", "--device", setting.device, *size)
    report.data["reference"] = reference
    say("sizes")
    n_ctx = N_CTX[setting.kind]
    casts = [
        cast_one(small, large, third, n_ctx),
        cast_two(small, large, n_ctx // 2),
        cast_full(small, large, setting.kind),
    ]
    one, two, full = survey(setting, casts)
    switching = Switching(setting, report, say, small, large, third, reference, one, two, full)
    _reference_rows(switching)
    for part in (turns, wakes, beside, prefetched, kv):
        if setting.left_s < 5:
            report.notes.append(f"{part.__name__} was left out: the time was over")
            continue
        try:
            part(switching)
        except (ConductorError, AssertionError) as error:
            report.failures.append(f"{part.__name__}: {error}")
    if not setting.on_cuda:
        report.notes.append("on a cpu nothing is pinned and nothing sleeps: no figure is judged")


def _reference_rows(switching: Switching) -> None:
    kind = switching.reference["kind"]
    for side, what in (("h2d", "to the device"), ("d2h", "from the device")):
        value = switching.reference[f"{side}_gb_s"]
        switching.add(f"reference_{side}", f"reference: {kind} copy {what}", value, "GB/s")
