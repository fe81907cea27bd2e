"""``conductor models``: what the catalogue offers, fetching and verifying it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vram_conductor.client import cli_fit, cli_models_own
from vram_conductor.client.fetch_hub import partial
from vram_conductor.client.model_files import here, model_files, verify
from vram_conductor.client.model_places import configured_places
from vram_conductor.client.output import Output
from vram_conductor.client.pull import Pulled, find, pull
from vram_conductor.client.text import size, table
from vram_conductor.protocol.catalogue import CatalogueModel, HubSource
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.stamp import model_stamp


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``models`` and its subcommands."""
    top = commands.add_parser("models", help="list, find, fetch and verify models")
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
    cli_models_own.add(verbs, common)
    cli_fit.add(verbs, common)


def _list(args: argparse.Namespace, output: Output) -> int:
    places = configured_places(args.config)
    rows: list[list[str]] = []
    values: list[dict[str, object]] = []
    for entry in places.files.load().model:
        path = places.path(entry)
        state = _state(entry, path)
        n_ctx = str(entry.n_ctx or "-")
        length = size(entry.size) if entry.size else "-"
        rows.append([entry.name, length, n_ctx, entry.licence or "-", state])
        values.append(
            {
                "name": entry.name,
                "path": str(path),
                "bytes": entry.size,
                "state": state,
                "licence": entry.licence,
                "sha256": entry.sha256,
                "n_ctx": entry.n_ctx,
                "source": entry.source,
            }
        )
    output.value({"models": values, "models_dir": str(places.folder), "own": str(places.files.own)})
    header = ["name", "size", "n_ctx up to", "licence", "here"]
    output.text(table(header, rows, right=(1, 2), width=output.width, squeeze=(3, 0)))
    output.text(
        f"\nfiles are in {places.folder}\nget one with: conductor models pull NAME\n"
        "name another: conductor models add NAME hf:OWNER/REPO:Q4_K_M"
    )
    return 0


def _state(entry: CatalogueModel, path: Path) -> str:
    if not here(entry, path):
        come = _come(entry, path)
        return f"{100 * come // entry.size} % has come" if come else "no"
    digest = model_stamp(path)
    if digest is None:
        return "yes, not verified"
    return "yes, verified" if digest == entry.sha256 or not entry.sha256 else "CORRUPT"


def _come(entry: CatalogueModel, path: Path) -> int:
    """Bytes of a model that is not whole yet."""
    if not isinstance(entry.source, HubSource):
        return 0
    files = model_files(entry, path)
    paths = [each for file in files for each in (file.path, partial(file.path, file.sha256))]
    return sum(each.stat().st_size for each in paths if each.exists())


def _pull(args: argparse.Namespace, output: Output) -> int:
    places = configured_places(args.config)
    catalogue = places.files.load()
    entries = [find(catalogue, name) for name in args.name]  # all names before the first byte
    values: list[dict[str, object]] = []
    for entry in entries:
        done = pull(
            entry,
            places.folder,
            places.base,
            accept_licence=args.accept_licence,
            say=output.news,
            progress=output.progress,
        )
        values.append(pulled(done, output))
    output.value({"models": values})
    return 0


def pulled(done: Pulled, output: Output) -> dict[str, object]:
    """Say it; what programs are told of it."""
    verb = "fetched and verified" if done.fetched else "here, verified"
    output.text(f"{done.name}: {verb}, {size(done.bytes)}\n  {done.path}")
    return {
        "name": done.name,
        "path": str(done.path),
        "bytes": done.bytes,
        "sha256": done.sha256,
        "fetched": done.fetched,
    }


def _verify(args: argparse.Namespace, output: Output) -> int:
    places = configured_places(args.config)
    catalogue = places.files.load()
    named = [find(catalogue, name) for name in args.name]
    entries = named or [e for e in catalogue.model if here(e, places.path(e))]
    failed = 0
    values: list[dict[str, object]] = []
    for entry in entries:
        try:
            digest = verify(entry, places.path(entry), rehash=True, progress=output.progress)
            verdict = "ok" if entry.sha256 else "no digest to compare with"
            output.text(f"{entry.name}: {verdict}, sha256 {digest}")
            values.append(
                {
                    "name": entry.name,
                    "ok": True,
                    "compared": bool(entry.sha256),
                    "sha256": digest,
                }
            )
        except ConductorError as error:
            failed += 1
            output.complain(error)
            values.append({"name": entry.name, "ok": False, "reason": error.reason})
    output.value({"models": values})
    if not entries:
        output.text("no model is here; get one with: conductor models pull NAME")
    return 1 if failed else 0
