"""``conductor drain``: a device's worker leaves, and another one takes its place."""

from __future__ import annotations

import argparse
import time
from typing import Any

from vram_conductor.client.cli_agents import connect, talking
from vram_conductor.client.effects import News
from vram_conductor.client.output import Output
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, plural
from vram_conductor.client.time_argument import seconds
from vram_conductor.protocol.drain import HOLD_MS, DrainReceipt
from vram_conductor.protocol.errors import InvalidArgument, Unavailable
from vram_conductor.protocol.status import DeviceStatus, WorkerStatus

POLL_S = 0.1


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``drain``."""
    drain = commands.add_parser(
        "drain",
        parents=[talking(common)],
        help="let a device's worker leave, to replace it; requests wait, nothing is lost",
        description="Lets the worker of a device finish what runs, park everything and leave. "
        "Jobs and registrations that come meanwhile wait for the next worker: `conductor up` and "
        "systemd start it by themselves, with what is installed by then; elsewhere, start "
        "`conductor worker`.",
    )
    drain.add_argument(
        "device", metavar="DEVICE", nargs="?", help="for example cuda:0 (default: the only one)"
    )
    drain.add_argument(
        "--finish",
        type=seconds,
        metavar="TIME",
        help="what runs may go on for so long, for example 5m (default: the broker's drain_ms)",
    )
    drain.add_argument(
        "--hold",
        type=seconds,
        default=HOLD_MS // 1000,
        metavar="TIME",
        help=f"requests wait so long for the next worker (default: {duration(HOLD_MS)})",
    )
    drain.add_argument(
        "--wait", action="store_true", help="return when the next worker serves the device"
    )
    drain.set_defaults(run=_drain)


def _drain(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        device = _device(conductor, args.device)
        text = f"the worker of {device.device} finishes what runs"
        with output.waiting(text) as waiting:

            def tell(news: News) -> None:
                waiting.now = f"{text}: {news.note}"

            receipt = conductor.drain(
                device.device,
                worker_epoch=device.worker.worker_epoch if device.worker else None,
                drain_s=args.finish,
                hold_s=args.hold,
                on_progress=tell,
            )
        output.text(_told(receipt))
        if not args.wait:
            output.value(receipt)
            output.text(
                f"requests wait up to {duration(1000 * args.hold)} for the next one: `conductor "
                f"up` and systemd start it; else: conductor worker --device {receipt.device}"
            )
            return 0
        with output.waiting(f"waiting for the next worker of {device.device}"):
            following = _next(conductor, receipt, args.hold)
    output.value({"left": receipt, "next": following})
    output.text(
        f"the next one serves it: pid {following.pid} on {following.host}, version "
        f"{following.version}, build {following.build}"
    )
    return 0


def _told(receipt: DrainReceipt) -> str:
    ran = receipt.finished or receipt.cut_off
    jobs = f"{plural(receipt.finished, 'job')} finished" if ran else "nothing ran"
    if receipt.cut_off:
        jobs += f", {receipt.cut_off} cut off (their tokens are kept)"
    if receipt.waiting:
        jobs += f", {receipt.waiting} wait for the next worker"
    return (
        f"the worker of {receipt.device} has left after {duration(receipt.ms)}: pid {receipt.pid} "
        f"on {receipt.host}, version {receipt.version}, build {receipt.build}; {jobs}"
    )


def _device(conductor: Conductor, name: str | None) -> DeviceStatus:
    """The device that is meant.

    Raises:
        InvalidArgument: ``bad_flags``: there are several, or there is none of this name.
    """
    devices = conductor.status().devices
    found = [item for item in devices if name in (None, item.device)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(item.device for item in devices) or "none"
    what = f"there is no device {name!r}" if name else "which device?"
    raise InvalidArgument(
        "bad_flags", f"{what} (this broker has: {names}): conductor drain DEVICE", field="device"
    )


def _next(conductor: Conductor, receipt: DrainReceipt, hold_s: int) -> WorkerStatus:
    """The worker that serves after the one that left.

    Raises:
        Unavailable: ``no_worker``: none came in time.
    """
    until_s = time.monotonic() + hold_s
    while True:
        for device in conductor.status().devices:
            worker = device.worker if device.device == receipt.device else None
            if worker is not None and worker.worker_epoch != receipt.worker_epoch:
                return worker
        if time.monotonic() >= until_s:
            raise Unavailable(
                "no_worker",
                f"no other worker of {receipt.device} came within {hold_s} s; start it: conductor "
                f"worker --device {receipt.device}; if `conductor up` runs, its log says why it "
                "does not",
                retryable=True,
                device=receipt.device,
            )
        time.sleep(POLL_S)
