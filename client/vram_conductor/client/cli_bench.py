"""``conductor bench``: what this machine makes of the product, measured through all of it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec

from vram_conductor.client import (
    bench_estimate,
    bench_leak,
    bench_parallel,
    bench_pipeline,
    bench_switch,
    cli_bench_pipeline,
)
from vram_conductor.client.bench_plot import check_picture, load_pyplot, plot
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import (
    RANDOM_CPU,
    RANDOM_CUDA,
    BenchModel,
    Setting,
    check_device,
    given_models,
    random_models,
)
from vram_conductor.client.cli_run import check_worker_packages
from vram_conductor.client.live_line import Waiting
from vram_conductor.client.output import Output
from vram_conductor.protocol.config import SleepMode
from vram_conductor.protocol.errors import InvalidArgument

SECONDS_MOST = 7 * 86_400.0

Measure = Callable[[Setting, BenchReport, Callable[[str], None]], None]

BENCHES: dict[str, tuple[Measure, str]] = {
    "switch": (bench_switch.measure, "what giving the device to another agent costs"),
    "estimate": (bench_estimate.measure, "what is promised, and what the device then uses"),
    "leak": (bench_leak.measure, "what is in use after many switches, and after random steps"),
    "parallel": (bench_parallel.measure, "several models at once over one after the other"),
    "pipeline": (bench_pipeline.measure, "layers that travel while others are computed"),
}

GRID = "estimate"
"""Has models of its own and starts no conductor."""

PIPELINE = "pipeline"
"""Needs no model and starts no conductor."""

_ABOUT = """\
Starts a private broker and worker, measures through client, broker and worker, and stops them.
Every figure stands beside what is wanted of it and beside a reference of the same run. Without
--models it measures with random-weight models, which are made on the spot and kept in the
temporary folder for the next time.
"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``bench`` and its verbs. ``common`` is not for them: here --json takes a file."""
    bench = commands.add_parser(
        "bench",
        help="measure switching, parallel decode, the layer pipeline, estimates, leaks",
        description=_ABOUT,
    )
    verbs = bench.add_subparsers(dest="verb", metavar="BENCH", required=True)
    for name, (_, help_text) in BENCHES.items():
        about = cli_bench_pipeline.ABOUT if name == PIPELINE else _ABOUT
        verb = verbs.add_parser(name, help=help_text, description=about)
        verb.add_argument("--device", default="cpu", help="cpu (default), cuda:0, cuda:1 …")
        verb.set_defaults(models=None, random=None)
        verb.add_argument(
            "--seconds", type=float, default=600.0, help="be done within so many (default: 600)"
        )
        verb.add_argument(
            "--json",
            nargs="?",
            const="-",
            default=None,
            dest="json_file",
            metavar="FILE",
            help="write everything to FILE; without FILE, to stdout in place of the table",
        )
        verb.add_argument("--plot", metavar="FILE", help="draw a picture (PNG)")
        verb.set_defaults(run=_run, rounds=0, threads=0, sleep="auto")
        if name == PIPELINE:
            cli_bench_pipeline.add_flags(verb)
        if name in (GRID, PIPELINE):
            continue
        which = verb.add_mutually_exclusive_group()
        which.add_argument("--models", nargs="+", metavar="FILE", help="GGUF files")
        which.add_argument(
            "--random",
            metavar="SIZES",
            help=f"random-weight models, e.g. {','.join(RANDOM_CUDA)} (default on cuda)",
        )
        verb.add_argument(
            "--rounds", type=int, default=0, help="default: what the bench needs, on a cpu few"
        )
        verb.add_argument("--threads", type=int, default=0, help="cpu: compute threads; 0: all")
        verb.add_argument(
            "--sleep",
            choices=get_args(SleepMode),
            default="auto",
            help="cuda: off: unload and load models instead of letting them sleep",
        )


def _run(args: argparse.Namespace, output: Output) -> int:
    check_worker_packages()
    if args.json or args.json_file == "-":
        output = Output(json=True)
    # Said before minutes of measuring, not after.
    if args.plot is not None:
        check_picture(args.plot)
        _check_writable("--plot", args.plot)
        load_pyplot()
    if args.json_file not in (None, "-"):
        _check_writable("--json", args.json_file)
    setting = make_setting(args)
    measure, _ = BENCHES[args.verb]
    report = BenchReport(args.verb, setting.device, setting=setting.plain())
    try:
        with output.waiting(f"bench {args.verb}") as waiting:
            measure(setting, report, _say(output, waiting))
    except BaseException as error:
        # Minutes of measuring are worth more than the error that ended them, or a Ctrl-C.
        report.failures.append(f"not finished: {type(error).__name__}: {error}")
        if report.figures:
            _show(report, args, output)
        raise
    try:
        if args.plot is not None:
            plot(report, Path(args.plot))
    finally:
        _show(report, args, output)
    return 1 if report.failures else 0


def _show(report: BenchReport, args: argparse.Namespace, output: Output) -> None:
    # The file first: a stdout that is full or that nobody reads any more costs only itself.
    try:
        if args.json_file not in (None, "-"):
            data = msgspec.json.format(msgspec.json.encode(report.json()), indent=1)
            Path(args.json_file).write_bytes(data + b"\n")
    finally:
        output.text(report.text(output.width))
        output.value(report.json())


def _check_writable(flag: str, name: str) -> None:
    """Raises InvalidArgument ``bad_output`` for a file that could not be written later."""
    path = Path(name)
    folder = path.parent
    if not name or path.is_dir():
        what = "is no file" if name else "names no file"
    elif not folder.is_dir():
        what = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        what = "it may not be written"
    else:
        return
    raise InvalidArgument("bad_output", f"{flag} {name}: {what}; name another file", path=name)


def _say(output: Output, waiting: Waiting) -> Callable[[str], None]:
    """Steps are news for a log; a terminal shows them in the living line."""
    bench = waiting.now

    def show(text: str) -> None:
        waiting.now = f"{bench}: {text}"

    return show if sys.stderr.isatty() else output.news


def make_setting(args: argparse.Namespace) -> Setting:
    """What was asked for, models made.

    Raises:
        InvalidArgument: ``no_such_device``, ``unknown_size``, ``bad_value``, and what
            :func:`cli_bench_pipeline.extra` finds.
        NotFound: ``no_such_model``.
        FailedPrecondition: ``gguf_missing``, ``worker_missing``.
    """
    device = check_device(args.device)
    extra = {}
    if args.verb == PIPELINE:
        extra = cli_bench_pipeline.extra(args, on_cuda=device != "cpu")
    if args.rounds < 0 or args.threads < 0:
        raise InvalidArgument("bad_value", "--rounds and --threads must not be negative")
    # Not a number is not within anything, either.
    if not 0 <= args.seconds <= SECONDS_MOST:
        raise InvalidArgument(
            "bad_value", f"--seconds {args.seconds:g}: take 0 to {SECONDS_MOST:.0f} (a week)"
        )
    until_s = time.monotonic() + args.seconds
    return Setting(
        device, _models(args, device), args.rounds, args.threads, until_s, args.sleep, extra
    )


def _models(args: argparse.Namespace, device: str) -> tuple[BenchModel, ...]:
    if args.verb == GRID or (args.verb == PIPELINE and args.models is args.random is None):
        return ()
    if args.models:
        return given_models(args.models)
    usual = RANDOM_CUDA if device.startswith("cuda") else RANDOM_CPU
    sizes = usual if args.random is None else args.random.split(",")
    named = [size.strip() for size in sizes if size.strip()]
    if not named:
        raise InvalidArgument("bad_value", f"--random names no size: take {','.join(usual)}")
    return random_models(named)
