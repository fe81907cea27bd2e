"""Random steps of agents and leases against a tight cap, with the device watched meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.client.bench_bed import open_bed
from vram_conductor.client.bench_random import Walk, walk
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import Setting
from vram_conductor.client.bench_sizes import Role, survey
from vram_conductor.client.bench_watch import MemoryWatch
from vram_conductor.protocol.status import DeviceStatus

MIB = 1 << 20
STEPS = 10_000
N_CTX = {"cuda": 2048, "cpu": 512}
WALKERS = {"cuda": 8, "cpu": 4}
"""On a GPU most of a step is waiting: for a job's turn, for a lease's room."""

SEED = 20240607


def random_steps(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """Room for the largest model and half of the next, all models in play.

    Raises:
        ConductorError: what the product failed with, beyond refusals.
    """
    n_ctx = N_CTX[setting.kind]
    cast = [Role(f"r{at}", model, n_ctx) for at, model in enumerate(setting.models[-3:])]
    (sizes,) = survey(setting, [cast])
    movable = sorted(size.movable for size in sizes.models.values())
    capacity = sizes.capacity([[role.model.name] for role in cast]) + movable[-2] // 2
    with open_bed(setting, "timeshare", capacity) as bed:
        status = bed.status()
        assert status.worker is not None
        with MemoryWatch(setting.device, status.worker.pid, look=bed.status) as watch:
            begin = watch.now()
            steps = 10 * setting.number(cuda=STEPS // 10, cpu=10)
            say(f"{steps} random steps")
            watch.mark(f"{steps} random steps")
            found = walk(
                bed,
                [role.model for role in cast],
                n_ctx=n_ctx,
                steps=steps,
                seed=SEED,
                seconds=0.85 * setting.left_s,
                walkers=WALKERS[setting.kind],
                doing=watch.doing,
            )
            watch.mark("all gone")
            end = watch.now()
        complaints = bed.complaints()
    report.data["walk"] = watch.plain()
    report.data["walk_counts"] = found.counts
    report.data["walk_cap_bytes"] = status.promised.cap_bytes
    report.failures += found.problems + complaints
    _rows(report, status, watch, found, end - begin)


def _rows(
    report: BenchReport, status: DeviceStatus, watch: MemoryWatch, found: Walk, grown: int
) -> None:
    on_cuda = report.device.startswith("cuda")
    counts = ", ".join(f"{count} {what}" for what, count in sorted(found.counts.items()))
    wanted = STEPS if on_cuda else None
    report.add(Figure("walk", "random steps", found.steps, "", wanted, ">=", counts))
    problems = 0.0 if on_cuda else None
    what = "errors among them that are no refusals, and broken books"
    report.add(Figure("walk_problems", what, len(found.problems), "", problems))
    if not on_cuda:
        return
    foreign = status.memory.foreign_bytes if status.memory else 0
    cap, peak = status.promised.cap_bytes, max(watch.used_bytes) - foreign
    note = f"peak {peak / MIB:.0f} MiB of a cap of {cap / MIB:.0f} MiB, {watch.why()}"
    what = "most ever in use meanwhile, over the cap"
    report.add(Figure("walk_peak", what, max(0, peak - cap) / MIB, "MiB", 0.0, note=note))
    what = "in use after the last of them, over before the first"
    report.add(Figure("walk_end", what, grown / MIB, "MiB"))
