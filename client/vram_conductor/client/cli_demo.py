"""``conductor demo``: the claims of the project, checked on this machine in under a minute."""

from __future__ import annotations

import argparse
from typing import Any

from vram_conductor.client.cli_run import check_worker_packages
from vram_conductor.client.demo import run_demo
from vram_conductor.client.output import Output


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``demo``."""
    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="three agents, two models, a budget for one pool; every claim checked",
    )
    demo.add_argument(
        "--gemma",
        action="store_true",
        help="use Gemma 3 270M as the second model and accept its terms",
    )
    demo.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    check_worker_packages()
    return run_demo(output, gemma=args.gemma)
