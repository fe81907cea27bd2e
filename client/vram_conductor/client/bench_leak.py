"""``bench leak``: what is in use after many switches, after unregistering, and at the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from vram_conductor.client.bench_bed import Bed, open_bed
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import Setting
from vram_conductor.client.bench_sizes import Role, register, survey
from vram_conductor.client.bench_turns import fill, short_turn, warm_up
from vram_conductor.client.bench_walk import random_steps
from vram_conductor.client.bench_watch import MemoryWatch
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.status import DeviceStatus

MIB = 1 << 20
BACK_MIB = 4.0
WARM_UP = 20
REFILL_EVERY = 200
LINES_EVERY = 10
N_CTX = {"cuda": 4096, "cpu": 1024}
TOKENS = {"cuda": 640, "cpu": 64}
LONGEST = {"cuda": 960, "cpu": 96}
"""About what a conversation has when it is filled anew."""
SWITCHES_SHARE = 0.48
"""Of the time; the random steps have the rest."""


@dataclass(frozen=True)
class Life:
    """Two agents from their registration to the end, in bytes in use.

    Attributes:
        before, after: before and after the switches, with the same one on the device.
        empty: nobody is registered any more.
        unexplained: in use at ``before``, and in no line of the worker's.
    """

    before: int
    after: int
    empty: int
    unexplained: int
    switches: int
    seconds: float


@dataclass(frozen=True)
class Levels:
    """What is compared.

    Attributes:
        fresh: in use when the worker has started.
        empty: after a first short life, in which whatever is made once should be made.
        first, second: two lives alike. What is made once and late (kernels that are loaded at
            their first use) shows in the first, what leaks shows in both.
    """

    fresh: int
    empty: int
    first: Life
    second: Life


def measure(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """Switches, then the way back to nothing.

    Raises:
        InvalidArgument: ``too_few_models``.
        ConductorError: what the product failed with.
    """
    setting.need(2)
    models = setting.models[-2:]
    n_ctx = N_CTX[setting.kind]
    cast = [Role("a", models[0], n_ctx), Role("b", models[1], n_ctx)]
    say("sizes")
    (sizes,) = survey(setting, [cast])
    capacity = sizes.capacity([[model.name] for model in models])
    with open_bed(setting, "timeshare", capacity) as bed:
        status = bed.status()
        report.device_name = status.name
        assert status.worker is not None
        with MemoryWatch(setting.device, status.worker.pid, look=bed.status) as watch:
            levels = _lives(setting, bed, watch, cast, say)
        report.failures += bed.complaints()
    _level_rows(report, levels)
    if setting.on_cuda:
        _peak_row(report, watch, status)
    report.data["watch"] = watch.plain()
    report.data["cap_bytes"] = status.promised.cap_bytes
    report.data["foreign_bytes"] = _foreign(status)
    report.data["levels"] = dataclasses.asdict(levels)
    try:
        random_steps(setting, report, say)
    except ConductorError as error:
        report.failures.append(f"random steps: {error}")
    if not setting.on_cuda:
        report.notes.append(
            "on a cpu the anonymous memory of the worker is watched, which the allocator keeps: "
            "no figure is judged"
        )


def _lives(
    setting: Setting,
    bed: Bed,
    watch: MemoryWatch,
    cast: list[Role],
    say: Callable[[str], None],
) -> Levels:
    fresh = watch.now()
    say("a short life, for what is made once")
    watch.doing("", "registering")
    register(bed, cast)
    for tokens in (TOKENS[setting.kind], LONGEST[setting.kind]):
        _refill(bed, watch, cast, tokens)
        _alternate(bed, watch, cast, WARM_UP if setting.on_cuda else 2)
    _leave(bed, watch, cast)
    empty = watch.now()
    end_s = watch.at_s[-1] + setting.left_s * SWITCHES_SHARE
    # The first one decides: where the time is short, the second has fewer switches.
    middle_s = watch.at_s[-1] + 0.65 * (end_s - watch.at_s[-1])
    first = _life(setting, bed, watch, cast, middle_s, say)
    second = _life(setting, bed, watch, cast, end_s, say)
    return Levels(fresh, empty, first, second)


def _life(
    setting: Setting,
    bed: Bed,
    watch: MemoryWatch,
    cast: list[Role],
    end_s: float,
    say: Callable[[str], None],
) -> Life:
    tokens = TOKENS[setting.kind]
    watch.doing("", "registering")
    register(bed, cast)
    _refill(bed, watch, cast, tokens)
    watch.doing("", "copying weights to host memory")
    warm_up(bed, [role.agent for role in cast])
    _alternate(bed, watch, cast, WARM_UP if setting.on_cuda else 2)
    before = watch.now()
    unexplained = _note_lines(bed, watch)
    wanted = setting.number(cuda=1000, cpu=10)
    say(f"{wanted} switches")
    watch.mark(f"{wanted} switches")
    begin_s, done = watch.at_s[-1], 0
    while done < wanted and (watch.at_s[-1] < end_s or done < 2):
        if done and done % REFILL_EVERY == 0:
            _refill(bed, watch, cast, tokens)
        _alternate(bed, watch, cast, 2)
        done += 2
        if done % LINES_EVERY == 0:
            _note_lines(bed, watch)
    seconds = watch.at_s[-1] - begin_s
    after = watch.now()
    _leave(bed, watch, cast)
    watch.mark("all unregistered")
    return Life(before, after, watch.now(), unexplained, done, seconds)


def _note_lines(bed: Bed, watch: MemoryWatch) -> int:
    """Compare with what the worker says; the bytes that no line explains."""
    status = bed.status()
    watch.note_lines(status.resident_bytes + _foreign(status))
    return status.unattributed_bytes


def _leave(bed: Bed, watch: MemoryWatch, cast: list[Role]) -> None:
    for role in cast:
        watch.doing("", f"unregistering {role.agent}")
        bed.conductor.unregister(role.agent)


def _refill(bed: Bed, watch: MemoryWatch, cast: list[Role], tokens: int) -> None:
    for role in cast:
        watch.doing("", f"filling {role.agent} with {tokens} tokens")
        fill(bed, role.agent, tokens)


def _alternate(bed: Bed, watch: MemoryWatch, cast: list[Role], switches: int) -> None:
    """An even number of them, so that the last agent has the device at the end."""
    for index in range(switches):
        agent = cast[index % len(cast)].agent
        watch.doing("", f"a switch to {agent}")
        short_turn(bed, agent, index)


def _foreign(status: DeviceStatus) -> int:
    return status.memory.foreign_bytes if status.memory else 0


def _level_rows(report: BenchReport, levels: Levels) -> None:
    on_cuda = report.device.startswith("cuda")
    first, second = levels.first, levels.second
    rows = [
        (
            "switches",
            f"in use after {first.switches} switches, over before",
            first.after - first.before,
            f"{first.switches / first.seconds:.1f} switches/s" if first.seconds else "",
        ),
        (
            "unregistered",
            "in use after unregistering all, over the same point before the switches",
            first.empty - levels.empty,
            f"{(first.empty - levels.fresh) / MIB:.1f} MiB over a fresh worker",
        ),
        (
            "again",
            f"in use after {second.switches} switches more, over after the first ones",
            second.after - first.after,
            "what leaks grows again, what is made once does not",
        ),
        (
            "unregistered_again",
            "in use after unregistering all again, over the first time",
            second.empty - first.empty,
            "",
        ),
    ]
    for key, what, n_bytes, note in rows:
        wanted = BACK_MIB if on_cuda else None
        report.add(Figure(key, what, n_bytes / MIB, "MiB", wanted, "<=", note))
    if on_cuda:
        what = "in use and in no line of the ledger, at rest"
        report.add(Figure("unexplained", what, first.unexplained / MIB, "MiB"))


def _peak_row(report: BenchReport, watch: MemoryWatch, status: DeviceStatus) -> None:
    cap, own = status.promised.cap_bytes, max(watch.used_bytes) - _foreign(status)
    note = f"peak {own / MIB:.0f} MiB of a cap of {cap / MIB:.0f} MiB, {watch.why()}"
    what = f"most ever in use, over the cap ({len(watch.used_bytes)} samples)"
    report.add(Figure("peak", what, max(0, own - cap) / MIB, "MiB", 0.0, "<=", note))
