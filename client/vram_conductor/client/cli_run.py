"""``conductor up``, ``broker`` and ``worker``: starting processes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from vram_conductor.client.defaults import find_config, make_default
from vram_conductor.client.output import Output
from vram_conductor.client.probing import INSTALL
from vram_conductor.client.supervisor import Supervisor
from vram_conductor.client.up_lock import UpLock
from vram_conductor.client.up_news import UpNews
from vram_conductor.protocol.config import Config, load_config, overlay, state_dir
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument

PARTS = ("broker", "worker")
_WORKER_NEEDS = ("llama_cpp", "numpy", "jinja2", "xxhash", "psutil")

_UP = """\
Starts the broker and a worker for every device of the configuration (or, without one, for what
this box has), starts them again when they die, and stops them when it is stopped. Results are on
stdout, the logs of broker and workers on stderr. Ctrl-C or SIGTERM lets what runs finish (at most
broker.drain_ms) and parks every conversation; a second Ctrl-C does not wait.
"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``up``, ``broker`` and ``worker``."""
    up = commands.add_parser(
        "up",
        parents=[common],
        help="start and supervise a broker and this box's workers",
        description=_UP,
    )
    up.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="of broker and workers (default: warning on a terminal, else info)",
    )
    up.set_defaults(run=_up)
    for part in PARTS:
        # For the list of commands: its flags are never parsed here, see ``cli.main``.
        single = commands.add_parser(
            part, help=f"start one {part}, with flags of its own (see --help)"
        )
        single.set_defaults(run=_part)


def _part(args: argparse.Namespace, output: Output) -> NoReturn:
    become(args.command, [])


def become(part: str, flags: Sequence[str]) -> NoReturn:
    """Become the broker or a worker: flags, signals and exit code are its own."""
    module = f"vram_conductor.{part}"
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])


def _up(args: argparse.Namespace, output: Output) -> int:
    path = find_config(args.config)
    if path is None:
        path = make_default()
        output.news(f"no configuration given: using {path}, which describes this box")
    config = overlay(load_config(path), os.environ)
    devices = managed_devices(config, path)
    if devices:
        check_worker_packages()
    lock = UpLock(state_dir(config.broker))
    logging = ["--log-level", args.log_level or ("warning" if sys.stderr.isatty() else "info")]
    supervisor = Supervisor(
        path,
        devices,
        broker_args=logging,
        worker_args=logging,
        drain_s=config.broker.drain_ms / 1000,
        say=output.news,
    )
    news: UpNews | None = None
    try:
        with _stopping(supervisor):
            if endpoints := supervisor.start():
                output.value({"endpoints": endpoints, "devices": devices, "pid": os.getpid()})
                if not output.json:
                    news = UpNews(endpoints, devices, output.text, config.client.key)
            code = supervisor.run()
            output.news("stopped" if code == 0 else "stopped: see above")
            return code
    finally:
        supervisor.shutdown()
        if news is not None:
            news.close()
        lock.release()


@contextlib.contextmanager
def _stopping(supervisor: Supervisor) -> Generator[None]:
    """SIGINT and SIGTERM drain; once more, and nothing is waited for."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        first = supervisor.stop()
        text = "what runs may finish; Ctrl-C again does not wait" if first else "at once"
        # Not through ``output``: the main thread may hold its lock.
        with contextlib.suppress(OSError):
            os.write(2, f"\nstopping: {text}\n".encode())

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to stay
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def check_worker_packages() -> None:
    """Say at once what a worker would fail with again and again. Imports nothing of it.

    Raises:
        FailedPrecondition: ``worker_missing``.
    """
    missing = [name for name in _WORKER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedPrecondition(
            "worker_missing",
            f"a worker cannot run here: {', '.join(missing)} not installed; {INSTALL}",
            missing=missing,
        )
