"""``conductor models``: what the catalogue offers, fetching and verifying it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from vram_conductor.client.defaults import find_config
from vram_conductor.client.output import Output
from vram_conductor.client.pull import find, pull, verify
from vram_conductor.client.text import size, table
from vram_conductor.protocol.catalogue import (
    Catalogue,
    CatalogueModel,
    load_catalogue,
    model_path,
    packaged_catalogue,
)
from vram_conductor.protocol.config import load_config, models_dir, overlay
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.stamp import read_stamp


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``models`` and its subcommands."""
    top = commands.add_parser("models", help="list, fetch and verify models")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", parents=[common], help="the catalogue and what is here")
    listing.set_defaults(run=_list)
    fetch = verbs.add_parser("pull", parents=[common], help="fetch models, verified by digest")
    fetch.add_argument("name", metavar="NAME", nargs="+")
    fetch.add_argument(
        "--accept-licence", action="store_true", help="I accept the licences of gated models"
    )
    fetch.set_defaults(run=_pull)
    check = verbs.add_parser(
        "verify",
        parents=[common],
        help="compare what is here with the catalogue's digests",
    )
    check.add_argument("name", metavar="NAME", nargs="*", help="default: all that are here")
    check.set_defaults(run=_verify)


def _places(args: argparse.Namespace) -> tuple[Catalogue, Path, Path]:
    """The catalogue, the models folder, the folder that relative paths start from."""
    worker = overlay(load_config(find_config(args.config)), os.environ).worker
    file = Path(worker.catalogue) if worker.catalogue else packaged_catalogue()
    return load_catalogue(file), models_dir(worker), file.parent


def _list(args: argparse.Namespace, output: Output) -> int:
    catalogue, folder, base = _places(args)
    rows: list[list[str]] = []
    values: list[dict[str, object]] = []
    for entry in catalogue.model:
        path = model_path(entry, folder, base)
        state = _state(entry, path)
        n_ctx = str(entry.n_ctx or "-")
        length = size(entry.size) if entry.size else "-"
        rows.append([entry.name, length, n_ctx, entry.licence or "-", state])
        values.append(
            {"name": entry.name, "path": str(path), "bytes": entry.size, "state": state}
            | {"licence": entry.licence, "sha256": entry.sha256, "n_ctx": entry.n_ctx}
        )
    output.value({"models": values, "models_dir": str(folder)})
    header = ["name", "size", "n_ctx up to", "licence", "here"]
    output.text(table(header, rows, right=(1, 2), width=output.width, squeeze=(3, 0)))
    output.text(f"\nfiles are in {folder}\nget one with: conductor models pull NAME")
    return 0


def _state(entry: CatalogueModel, path: Path) -> str:
    if not path.exists():
        return "no"
    digest = read_stamp(path)
    if digest is None:
        return "yes, not verified"
    return "yes, verified" if digest == entry.sha256 or not entry.sha256 else "CORRUPT"


def _pull(args: argparse.Namespace, output: Output) -> int:
    catalogue, folder, base = _places(args)
    entries = [find(catalogue, name) for name in args.name]  # all names before the first byte
    values: list[dict[str, object]] = []
    for entry in entries:
        done = pull(
            entry,
            folder,
            base,
            accept_licence=args.accept_licence,
            say=output.news,
            progress=output.progress,
        )
        verb = "fetched and verified" if done.fetched else "here, verified"
        output.text(f"{done.name}: {verb}, {size(done.bytes)}\n  {done.path}")
        values.append(
            {"name": done.name, "path": str(done.path), "bytes": done.bytes}
            | {"sha256": done.sha256, "fetched": done.fetched}
        )
    output.value({"models": values})
    return 0


def _verify(args: argparse.Namespace, output: Output) -> int:
    catalogue, folder, base = _places(args)
    named = [find(catalogue, name) for name in args.name]
    entries = named or [e for e in catalogue.model if model_path(e, folder, base).exists()]
    failed = 0
    values: list[dict[str, object]] = []
    for entry in entries:
        try:
            path = model_path(entry, folder, base)
            digest = verify(entry, path, rehash=True, progress=output.progress)
            output.text(f"{entry.name}: ok, sha256 {digest}")
            values.append({"name": entry.name, "ok": True, "sha256": digest})
        except ConductorError as error:
            failed += 1
            output.complain(error)
            values.append({"name": entry.name, "ok": False, "reason": error.reason})
    output.value({"models": values})
    if not entries:
        output.text("no model is here; get one with: conductor models pull NAME")
    return 1 if failed else 0
