"""``conductor models fit``: which context and KV type of a model fit a device now."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import msgspec

from vram_conductor.client.cli_agents import connect, talking
from vram_conductor.client.fit_unpulled import NOT_PULLED, fit_unpulled
from vram_conductor.client.model_argument import model_argument
from vram_conductor.client.model_places import configured_places
from vram_conductor.client.output import Output
from vram_conductor.client.text import plural, size, table, wrapped
from vram_conductor.protocol.catalogue import CatalogueModel, HubSource
from vram_conductor.protocol.errors import ErrorInfo, NotFound
from vram_conductor.protocol.fitting import FitDevice, FitReport, FitRow

EXIT_DENIED = 3

_LIMITS = {
    "": "-",
    "training": "training",
    "device": "device",
    "host": "host memory",
    "quota": "your quota",
    "protocol": "protocol",
}
_HEADER = ["KV", "n_ctx up to", "weights", "KV cache", "compute", "asks for", "parked", "limit"]


def add(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Register ``fit``."""
    fit = verbs.add_parser(
        "fit",
        parents=[talking(common)],
        help="which n_ctx and KV type would be admitted now, and of what bytes",
        description="Asks the broker how large a context one more agent of MODEL could have now, "
        "beside all that is promised already, with each type of KV cache. Its answers are those "
        "that `conductor register` would get; nothing is promised, and nothing is loaded. Of a "
        "model of the Hugging Face hub that is not here yet, only the headers are fetched.",
    )
    fit.add_argument("model", metavar="MODEL", help="as for conductor register --model")
    fit.add_argument("--device", help="only this one, for example cuda:0 (default: all)")
    fit.add_argument(
        "--slots",
        type=int,
        default=1,
        metavar="N",
        help="agents of the model that may have KV on the device at once",
    )
    fit.set_defaults(run=_fit)


def _fit(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:

        def ask(model: str) -> FitReport:
            with output.waiting(f"estimating {args.model}"):
                return conductor.fit(model, device=args.device, slots=args.slots)

        try:
            report, here = ask(model_argument(args.model, conductor.endpoint)), True
        except NotFound as error:
            unpulled = _on_the_hub(args, error, conductor.endpoint)
            if unpulled is None:
                raise
            entry, source = unpulled
            report, here = fit_unpulled(source, entry, ask, output), False
            report = msgspec.structs.replace(report, model=args.model)
    output.value(report)
    output.text(render(report, args.model, output.width, _as_asked(args)))
    if not here:
        output.text(f"\nfirst: conductor models pull {args.model}")
    return 0 if any(row.n_ctx for row in report.rows) else EXIT_DENIED


def _on_the_hub(
    args: argparse.Namespace, error: NotFound, endpoint: str
) -> tuple[CatalogueModel, HubSource] | None:
    """The model that the worker has not, if its headers can be had: a worker on this machine can
    look at them."""
    if error.reason != NOT_PULLED or not endpoint.startswith("ipc://"):
        return None
    entry = configured_places(args.config).files.load().find(args.model)
    if entry is None or not isinstance(entry.source, HubSource):
        return None
    return entry, entry.source


def _as_asked(args: argparse.Namespace) -> str:
    """The flags that lead to the same broker, as they were typed."""
    given = {"--config": args.config, "--clients": args.clients, "--key": args.key}
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in given.items() if value)


def render(report: FitReport, model: str, width: int, broker: str = "") -> str:
    """The report for people. ``model``: as it was typed; ``broker``: flags that name it."""
    facts = [report.arch, size(report.file_bytes)] if report.file_bytes else []
    if report.n_ctx_train:
        facts.append(f"trained with n_ctx {report.n_ctx_train}")
    blocks = [f"{model}: {', '.join(facts)}" if facts else model]
    for device in report.devices:
        rows = [row for row in report.rows if row.device == device.device]
        blocks.append(_device(device, rows, width))
    best = max(report.rows, key=lambda row: row.n_ctx, default=None)
    if best is not None and best.n_ctx:
        legend = (
            "asks for: what would be promised beyond what is; parked: host memory for its state, "
            "at most. For example:"
        )
        blocks.append(f"{wrapped(legend, width)}\n  {_command(report, best, model)}{broker}")
    return "\n\n".join(blocks)


def _device(device: FitDevice, rows: list[FitRow], width: int) -> str:
    lines = [wrapped(_ledger(device), width, hanging=2)] if device.cap_bytes else []
    if any(row.n_ctx for row in rows):
        cells = [_cells(row) for row in rows]
        lines.append(table(_HEADER, cells, right=(1, 2, 3, 4, 5, 6), width=width, squeeze=(7,)))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.error is not None:
            reasons.setdefault(_reason(row.error), []).append(row.kv_type)
    for reason, kv_types in reasons.items():
        which = "" if len(kv_types) == len(rows) else f" with {' and '.join(kv_types)}"
        text = f"{device.device}: nothing fits{which}: {reason}"
        lines.append(wrapped(text, width, hanging=2))
    return "\n".join(lines)


def _ledger(device: FitDevice) -> str:
    promised = [plural(device.agents, "agent")]
    if device.base_bytes:
        promised.append(f"{size(device.base_bytes)} the worker itself")
    if device.leases_bytes:
        promised.append(f"{size(device.leases_bytes)} leases")
    text = (
        f"{device.device}: may promise {size(device.cap_bytes)}, has promised "
        f"{size(device.promised_bytes)} ({', '.join(promised)})"
    )
    if device.foreign_bytes:
        text += f", others use {size(device.foreign_bytes)}"
    text += f"; {size(device.free_bytes)} are left"
    host_left = max(0, device.host_cap_bytes - device.host_promised_bytes)
    return f"{text}, and {size(host_left)} of host memory"


def _cells(row: FitRow) -> list[str]:
    if not row.n_ctx:
        return [row.kv_type, "0", *["-"] * 6]
    return [
        row.kv_type,
        str(row.n_ctx),
        "shared" if row.shares_weights else size(row.weights_bytes),
        size(row.kv_bytes + row.recurrent_bytes),
        size(row.compute_bytes + row.scratch_bytes),
        size(row.requested_bytes),
        size(row.state_bytes),
        _LIMITS.get(row.limit, row.limit),
    ]


def _reason(error: ErrorInfo) -> str:
    """What REGISTER would answer. The ledger's line for operators says too much here."""
    hint, short, n_ctx = (error.details.get(key) for key in ("hint", "short_by_bytes", "n_ctx"))
    if not isinstance(hint, str):
        return f"{error.message} ({error.reason})"
    if not isinstance(short, int) or not short:
        return hint
    smallest = f" even with n_ctx {n_ctx}" if isinstance(n_ctx, int) else ""
    return f"{size(short)} are missing{smallest}; {hint}"


def _command(report: FitReport, row: FitRow, model: str) -> str:
    words = ["conductor register AGENT --model", model, f"--n-ctx {row.n_ctx}"]
    words.append(f"--kv-type {row.kv_type}")
    if len(report.devices) > 1:
        words.append(f"--device {row.device}")
    if report.slots > 1:
        words.append(f"--slots {report.slots}")
    return " ".join(words)
