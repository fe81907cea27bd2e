"""``conductor lease``: device memory for a program that is no agent."""

from __future__ import annotations

import argparse
from typing import Any

from vram_conductor.client.cli_agents import connect, talking
from vram_conductor.client.effects import News
from vram_conductor.client.output import Output
from vram_conductor.client.text import duration, size
from vram_conductor.client.time_argument import seconds
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.limits import LEASE_TTL_S_MAX


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``lease``."""
    lease = commands.add_parser(
        "lease",
        parents=[talking(common)],
        help="device memory for another program: agents make room, for a time",
        description="Asks for device memory for a program that is no agent, and returns when it "
        "is free. Agents that do not fit beside it wait; no conversation is lost. It ends by "
        "itself; the same command again renews it.",
    )
    lease.add_argument("name", metavar="NAME", help="a name, unique among yours")
    lease.add_argument("bytes", metavar="BYTES", nargs="?", help="for example 3GB or 512MiB")
    lease.add_argument(
        "--ttl",
        type=seconds,
        default=600,
        metavar="TIME",
        help=f"for example 90s, 10m (the default), at most {duration(1000 * LEASE_TTL_S_MAX)}",
    )
    lease.add_argument("--device", help="for example cuda:0 (default: where the most is left)")
    lease.add_argument(
        "--no-park",
        dest="park",
        action="store_false",
        help="take only what no agent was promised, so that none has to wait",
    )
    lease.add_argument("--release", action="store_true", help="end it now")
    lease.add_argument("--principal", help="with --release: whose, for an admin (default: yours)")
    lease.set_defaults(run=_lease)


def _lease(args: argparse.Namespace, output: Output) -> int:
    if args.release:
        return _release(args, output)
    if args.principal is not None:
        raise InvalidArgument(
            "bad_flags", "a lease is for yourself: --principal goes with --release", field="bytes"
        )
    if args.bytes is None:
        raise InvalidArgument(
            "bad_flags", "how much? conductor lease NAME BYTES, for example 3GB", field="bytes"
        )
    with connect(args) as conductor, output.waiting(f"asking for {args.bytes}") as waiting:

        def tell(news: News) -> None:
            waiting.now = f"agents make room: {size(news.done)} of {size(news.total)}"

        info = conductor.lease(
            args.name,
            args.bytes,
            ttl_s=args.ttl,
            device=args.device,
            park=args.park,
            on_progress=tell,
        ).info
    output.value(info)
    output.text(
        f"{info.name} has {size(info.bytes)} of {info.device} for "
        f"{duration(1000 * info.ttl_s)}; end it earlier with: "
        f"conductor lease {info.name} --release"
    )
    return 0


def _release(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        conductor.release_lease(args.name, principal=args.principal)
    output.value({"released": args.name})
    output.text(f"{args.name} is released")
    return 0
