"""The broker's command line: flags over environment over file over defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from vram_conductor.broker.shell.logs import LEVELS, Level, LogFormat
from vram_conductor.protocol.config import CONFIG_HELP, Config, find_config, load_config, overlay
from vram_conductor.protocol.errors import InvalidArgument

EXIT_OK = 0
EXIT_USAGE = 64
EXIT_DATA = 65
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70

EXIT_CODES = """exit codes (sysexits.h):
   0  drained and stopped
  64  wrong flags, environment or configuration
  65  the journal is damaged, or from a newer version
  69  an address or the state folder is in use or cannot be used
  70  a bug in the broker; the log has a traceback
"""

_OVERRIDES = {
    "clients": "endpoint for clients: ipc:///path or tcp://127.0.0.1:PORT (0: any port)",
    "workers": "endpoint for workers",
    "runtime-dir": "folder of the ipc sockets",
    "state-dir": "folder of the journal",
    "metrics-port": "serve Prometheus metrics on this port of 127.0.0.1; 0: don't",
    "drain-ms": "how long running jobs may go on after SIGTERM",
}
"""Flags that lay over keys of the ``[broker]`` section."""


@dataclass(frozen=True)
class Options:
    """What the process was told.

    Attributes:
        config: file, environment and flags merged.
        print_endpoints: write one JSON line with the bound endpoints to stdout.
        supervised_fd: end when this descriptor reads EOF.
        skip_corrupt: start with what is intact of a damaged journal.
    """

    config: Config
    print_endpoints: bool
    supervised_fd: int | None
    skip_corrupt: bool
    log_format: LogFormat
    log_level: Level


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Merge the command line with environment and file.

    Raises:
        InvalidArgument: ``bad_config``.
        SystemExit: 64 for unknown flags; 0 after ``--help``.
    """
    given = _parser().parse_args(argv)
    flags = {name: getattr(given, name) for name in (key.replace("-", "_") for key in _OVERRIDES)}
    config = overlay(load_config(find_config(given.config, env)), env, {"broker": flags})
    _check(config)
    return Options(
        config=config,
        print_endpoints=given.print_endpoints,
        supervised_fd=given.supervised_fd,
        skip_corrupt=given.journal_skip_corrupt,
        log_format=given.log_format,
        log_level=given.log_level,
    )


def _parser() -> _Parser:
    parser = _Parser(
        prog="conductor broker",
        description="The broker: admits agents, queues jobs, streams replies. Needs no GPU.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
    for name, text in _OVERRIDES.items():
        kind = int if name in ("metrics-port", "drain-ms") else str
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument(
        "--print-endpoints", action="store_true", help="one JSON line on stdout when bound"
    )
    parser.add_argument(
        "--supervised-fd", type=int, metavar="N", help="end when descriptor N reads end of file"
    )
    parser.add_argument(
        "--journal-skip-corrupt",
        action="store_true",
        help="start with the intact part of a damaged journal; a copy of it is kept",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=tuple(LEVELS), default="info")
    return parser


def _check(config: Config) -> None:
    """Numbers of the broker's section that no type can check."""
    broker = config.broker
    positive = (
        "default_n_ctx worker_inflight queued_jobs_max queued_jobs_per_agent_max heartbeat_ms "
        "estimate_timeout_ms load_timeout_ms lease_wait_ms sample_max_age_ms"
    )
    for name in positive.split():
        if getattr(broker, name) < 1:
            raise InvalidArgument("bad_config", f"broker.{name} must be at least 1", key=name)
    for name in ("result_keep_ms", "orphan_ms", "resume_ms", "drain_ms", "worker_wait_ms"):
        if (getattr(broker, name) or 0) < 0:
            raise InvalidArgument("bad_config", f"broker.{name} must not be negative", key=name)
    if not 0 <= broker.metrics_port <= 65_535:
        raise InvalidArgument(
            "bad_config", "broker.metrics_port is 0 (off) or a port up to 65535", key="metrics_port"
        )
