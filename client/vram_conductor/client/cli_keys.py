"""``conductor keys``: who may reach a broker over tcp. Runs on the broker's host, as its user."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from vram_conductor.client.defaults import find_config
from vram_conductor.client.output import Output
from vram_conductor.client.text import size, table
from vram_conductor.protocol.check import check_name
from vram_conductor.protocol.config import (
    Config,
    keys_dir,
    load_config,
    overlay,
    parse_bytes,
)
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.key_files import KeyFolder, new_pair, save_key
from vram_conductor.protocol.keys import ROLES, Key, KeyFile, KeyList, Quota, quotas

_ABOUT = """\
Keys are how a broker knows clients and workers over tcp; over ipc it needs none. Run this on the
broker's host, as its user and with its configuration. The first key makes the broker's own, too:
start the broker again then. Later changes are seen within a second, without a restart.
"""

_NEW = """\
Writes NAME.key, which holds the secret: bring it to its owner, for example with scp, and delete it
here. The broker keeps the public half only.
"""

_FLAGS = {
    "agents": "--agents",
    "queued_jobs": "--queued-jobs",
    "vram_bytes": "--vram",
    "kv_bytes": "--kv",
}

_SHOWN_CHARS = 8
"""Of a public half: enough to find the one that the broker's log names."""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``keys``."""
    keys = commands.add_parser(
        "keys", help="who may reach the broker over tcp: new, list, revoke", description=_ABOUT
    )
    verbs = keys.add_subparsers(dest="verb", metavar="VERB", required=True)
    new = verbs.add_parser("new", parents=[common], help="make a key", description=_NEW)
    new.add_argument("name", metavar="NAME", help="what to call it, for example alice-laptop")
    new.add_argument("--principal", help="whose agents are its own (default: NAME)")
    new.add_argument(
        "--role",
        choices=ROLES,
        default="owner",
        help="owner (the default): agents of its own; observer: looks at its principal's; admin: "
        "also sees everybody's, may unregister them and end leases; worker: serves a device",
    )
    new.add_argument(
        "--device",
        action="append",
        metavar="ID",
        help="of a worker's key: the device that it may serve, for example cuda:0; may be given "
        "several times (default: any)",
    )
    new.add_argument("--out", metavar="FILE", help="where to write it (default: ./NAME.key)")
    quota = new.add_argument_group("limits of the principal (default: none)")
    quota.add_argument("--agents", type=int, metavar="N", help="registered agents")
    quota.add_argument("--queued-jobs", type=int, metavar="N", help="waiting jobs")
    quota.add_argument("--vram", metavar="BYTES", help="device memory, for example 6GiB")
    quota.add_argument("--kv", metavar="BYTES", help="KV of its agents, parked")
    new.set_defaults(run=_new)
    show = verbs.add_parser("list", parents=[common], help="all keys, with role and limits")
    show.set_defaults(run=_list)
    revoke = verbs.add_parser(
        "revoke", parents=[common], help="take a key back: its sessions end within a second"
    )
    revoke.add_argument("name", metavar="NAME", help="as in conductor keys list")
    revoke.set_defaults(run=_revoke)


def _config(args: argparse.Namespace) -> Config:
    return overlay(load_config(find_config(args.config)), os.environ)


def _folder(args: argparse.Namespace) -> KeyFolder:
    return KeyFolder(keys_dir(_config(args).broker))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _new(args: argparse.Namespace, output: Output) -> int:
    principal = args.principal or args.name
    for field, name in (("NAME", args.name), ("--principal", principal)):
        check_name(field, name)
    folder, first = _folder(args), not _folder(args).exists
    quota, devices = _quota(args), _devices(args)
    broker, pair = folder.prepare(), new_pair()
    key = Key(
        name=args.name,
        public=pair.public,
        principal=principal,
        role=args.role,
        quota=quota,
        devices=devices,
        created=_now(),
    )
    folder.read().with_key(key)  # whether it can be added, before its file is there
    out = Path(args.out or f"{args.name}.key")
    save_key(
        out,
        KeyFile(
            name=key.name,
            principal=principal,
            role=key.role,
            public=pair.public,
            secret=pair.secret,
            broker=broker.public,
        ),
    )
    try:
        folder.add(key)
    except BaseException:
        out.unlink()
        raise
    output.value({"name": key.name, "public": key.public, "file": str(out), "first": first})
    worker = f"a worker of {', '.join(devices) or 'any device'}"
    whose = worker if key.role == "worker" else f"{principal}, {key.role}"
    output.text(f"{out} is the key of {whose}: bring it to its owner and delete it here")
    known = [device.id for device in _config(args).device]
    for device in devices:
        if known and device not in known:
            output.news(
                f"the configuration has no [[device]] {device}, only {', '.join(known)}: the "
                f"broker refuses a worker of {device} until it has"
            )
    if first:
        output.text("the broker's first keys: if it runs, start it again, then tcp asks for them")
    return 0


def _devices(args: argparse.Namespace) -> tuple[str, ...]:
    """Raises InvalidArgument ``bad_value``, ``bad_name``."""
    devices = tuple(args.device or ())
    for device in devices:
        check_name("--device", device)
    if devices and args.role != "worker":
        raise InvalidArgument(
            "bad_value", "--device is for keys of workers: add --role worker", field="device"
        )
    return devices


def _quota(args: argparse.Namespace) -> Quota:
    """Raises InvalidArgument ``bad_size``, ``bad_value``."""
    try:
        return Quota(
            agents=args.agents,
            queued_jobs=args.queued_jobs,
            vram_bytes=None if args.vram is None else parse_bytes(args.vram),
            kv_bytes=None if args.kv is None else parse_bytes(args.kv),
        )
    except ValueError as error:
        raise InvalidArgument("bad_value", str(error), field="quota") from None


def _list(args: argparse.Namespace, output: Output) -> int:
    folder = _folder(args)
    keys = folder.read() if folder.exists else KeyList()
    output.value({"folder": str(folder.path), "keys": [msgspec.to_builtins(k) for k in keys.keys]})
    if not keys.keys:
        output.text(f"no keys in {folder.path}; make one: conductor keys new NAME")
        return 0
    head = ["NAME", "PRINCIPAL", "ROLE", "LIMITS", "SINCE", "PUBLIC"]
    rows = [
        [key.name, key.principal, key.role, _bounds(key), _since(key), key.public[:_SHOWN_CHARS]]
        for key in keys.keys
    ]
    output.text(table(head, rows, width=output.width, wrap=[0, 1, 3]))
    return 0


def _since(key: Key) -> str:
    """The day on which it was made, or revoked."""
    return f"revoked {key.revoked[:10]}" if key.revoked else key.created[:10]


def _bounds(key: Key) -> str:
    if key.revoked:
        return "-"
    return ", ".join(key.devices) or "any device" if key.role == "worker" else _limits(key.quota)


def _limits(quota: Quota) -> str:
    named = {
        "agents": quota.agents,
        "queued": quota.queued_jobs,
        "vram": None if quota.vram_bytes is None else size(quota.vram_bytes),
        "kv": None if quota.kv_bytes is None else size(quota.kv_bytes),
    }
    return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None) or "-"


def _revoke(args: argparse.Namespace, output: Output) -> int:
    folder = _folder(args)
    before, after = folder.revoke(args.name, _now())
    output.text(f"{args.name} is revoked; a running broker ends its sessions within a second")
    key = next(key for key in after.keys if key.name == args.name)
    was, now = (quotas(keys.valid()).get(key.principal, Quota()) for keys in (before, after))
    others = [each.name for each in after.valid().values() if each.principal == key.principal]
    output.value(
        {
            "revoked": args.name,
            "principal": key.principal,
            "keys": others,
            "limits": msgspec.to_builtins(now),
            "limits_before": msgspec.to_builtins(was),
        }
    )
    if was != now:
        output.text(_loosened(key.principal, others, was, now))
    return 0


def _loosened(principal: str, others: list[str], was: Quota, now: Quota) -> str:
    """What follows from limits that went with their key."""
    gone = f"limits of {principal} went with it: {_limits(was)}"
    if not others:
        return f"{gone}\nname them again with its next key, or it has none"
    flags = " ".join(
        f"{flag} {getattr(was, name)}"
        for name, flag in _FLAGS.items()
        if getattr(was, name) != getattr(now, name)
    )
    left = "none" if now == Quota() else _limits(now)
    return (
        f"{gone}\nwhat is left for {', '.join(others)}: {left}\n"
        f"to have them back: conductor keys new NAME --principal {principal} {flags}"
    )
