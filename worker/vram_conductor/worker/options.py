"""Command line of ``python -m vram_conductor.worker``, merged with environment and file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, get_args

from vram_conductor.protocol.config import (
    CONFIG_HELP,
    Config,
    DeviceConfig,
    SleepMode,
    find_config,
    load_config,
    overlay,
)
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.exits import EXIT_CODES, EXIT_USAGE
from vram_conductor.worker.logs import LEVELS, LogFormat

_WORKER_FLAGS = {
    "arena-dir": "folder for parked states, in shared memory",
    "model-dirs": "folders from which models may be loaded, separated by ':'",
    "models-dir": "folder of the pulled models",
    "catalogue": "the model catalogue (models.toml)",
    "sample-ms": "period of the memory sample",
    "hang-ms": "exit when the engine is busy and makes no step for this long",
    "key": "key file, for a broker over tcp",
    "lanes": "threads: models compute side by side; inline: one at a time; auto: as the device is",
}
"""Flags that lay over keys of the ``[worker]`` section."""


@dataclass(frozen=True)
class Options:
    """What the process was told.

    Attributes:
        config: file, environment and flags merged.
        device: the device to serve.
        supervised_fd: leave when this descriptor reads end of file.
    """

    config: Config
    device: DeviceConfig
    supervised_fd: int | None
    log_format: LogFormat
    log_level: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Merge the command line with environment and file.

    Raises:
        InvalidArgument: ``bad_config``, ``no_such_device``.
        SystemExit: 64 for unknown flags; 0 after ``--help``.
    """
    given = _parser().parse_args(argv)
    names = [name.replace("-", "_") for name in _WORKER_FLAGS]
    flags = {
        "worker": {name: getattr(given, name) for name in names},
        "broker": {"workers": given.workers},
        "device": {"sleep": given.sleep},
    }
    config = overlay(load_config(find_config(given.config, env)), env, flags)
    device = pick_device(config, given.device)
    if not config.device:
        device = overlay(Config(device=[device]), env, {"device": flags["device"]}).device[0]
    for key in ("sample_ms", "hang_ms", "drain_ms"):
        if getattr(config.worker, key) < 1:
            raise InvalidArgument("bad_config", f"worker.{key} must be at least 1", key=key)
    return Options(
        config=config,
        device=device,
        supervised_fd=given.supervised_fd,
        log_format=given.log_format,
        log_level=given.log_level,
    )


def pick_device(config: Config, name: str | None) -> DeviceConfig:
    """The device to serve: the one named, or the only one. *Pure.*

    Raises:
        InvalidArgument: ``no_such_device``.
    """
    known = [device.id for device in config.device]
    if name is None and len(known) == 1:
        return config.device[0]
    if name is None:
        raise InvalidArgument(
            "no_such_device",
            f"say which device: --device {' or '.join(known) or 'cpu'}",
            devices=known,
        )
    for device in config.device:
        if device.id == name:
            return device
    if known:
        raise InvalidArgument(
            "no_such_device",
            f"device {name!r} is not in the configuration ({', '.join(known)}); add a [[device]] "
            "table for it",
            devices=known,
        )
    kind = name.partition(":")[0]
    if kind == "cpu":
        return DeviceConfig(id=name, kind="cpu")
    if kind == "cuda":
        return DeviceConfig(id=name, kind="cuda")
    raise InvalidArgument("no_such_device", f"{name!r} is no device; write cpu, cuda:0 …")


def _parser() -> _Parser:
    parser = _Parser(
        prog="conductor worker",
        description="The worker of one device: owns llama.cpp, its models and their KV.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--device", help="id of the device to serve; default: the only one")
    parser.add_argument("--workers", metavar="ENDPOINT", help="the broker's endpoint for workers")
    for name, text in _WORKER_FLAGS.items():
        parser.add_argument(f"--{name}", type=int if name.endswith("-ms") else str, help=text)
    parser.add_argument(
        "--sleep", choices=get_args(SleepMode), help="whether the memory of a cuda device may sleep"
    )
    parser.add_argument(
        "--supervised-fd", type=int, metavar="N", help="leave when descriptor N reads end of file"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    return parser
