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
    which = demo.add_mutually_exclusive_group()
    which.add_argument(
        "--gemma",
        action="store_true",
        help="use Gemma 3 270M as the second model and accept its terms",
    )
    which.add_argument(
        "--original",
        action="store_true",
        help="use the three models that the first version was shown with, one for each agent "
        "(1.4 GiB from the Hugging Face hub, once), and accept their terms: Apache-2.0, and the "
        "Llama 3.2 Community License",
    )
    demo.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    check_worker_packages()
    return run_demo(output, gemma=args.gemma, original=args.original)
