"""``conductor up``, ``broker`` and ``worker``: starting processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from vram_conductor.client.defaults import find_config, make_default
from vram_conductor.client.output import Output
from vram_conductor.client.supervisor import Supervisor
from vram_conductor.protocol.config import Config, load_config
from vram_conductor.protocol.errors import InvalidArgument


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``up``, ``broker`` and ``worker``."""
    up = commands.add_parser(
        "up", parents=[common], help="start and supervise a broker and this box's workers"
    )
    up.set_defaults(run=_up)
    for part in ("broker", "worker"):
        single = commands.add_parser(
            part, help=f"start one {part} in the foreground", add_help=False
        )
        single.add_argument("rest", nargs=argparse.REMAINDER)
        single.set_defaults(run=_exec, part=part)


def _exec(args: argparse.Namespace, output: Output) -> int:
    """Become the process: its flags, signals and exit code are its own."""
    module = f"vram_conductor.{args.part}"
    os.execv(sys.executable, [sys.executable, "-m", module, *args.rest])


def _up(args: argparse.Namespace, output: Output) -> int:
    path = find_config(args.config)
    if path is None:
        path = make_default()
        output.news(f"no configuration given: using {path}")
    config = load_config(path)
    devices = managed_devices(config, path)
    drain_s = config.broker.drain_ms / 1000
    supervisor = Supervisor(path, devices, drain_s=drain_s, say=output.news)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.stop())
    try:
        endpoints = supervisor.start()
    except BaseException:
        supervisor.shutdown()
        raise
    output.value({"endpoints": endpoints, "devices": devices, "pid": os.getpid()})
    output.text(
        f"broker for clients at {endpoints['clients']}\n"
        f"workers for {', '.join(devices) or 'no device: start them with conductor worker'}\n"
        "stop with Ctrl-C; see it with: conductor status"
    )
    return supervisor.run()


def managed_devices(config: Config, path: Path) -> list[str]:
    """Ids of the devices whose workers run on this box.

    Raises:
        InvalidArgument: ``no_device``: a configuration without a device can serve nobody.
    """
    if not config.device:
        raise InvalidArgument(
            "no_device",
            f"{path} names no device; add a [[device]] section, see configs/cpu.toml, and "
            "start with: conductor up --config FILE",
        )
    return [device.id for device in config.device if device.managed]
