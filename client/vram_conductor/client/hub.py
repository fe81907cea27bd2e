"""The Hugging Face hub through its own client library: what a repository has, and what there is.

The library brings the user's token (``HF_TOKEN``, ``hf auth login``), mirror (``HF_ENDPOINT``),
proxies and certificates. It is imported when it is needed. The paths and names of the answers are
those of the hub's HTTP API (huggingface.co/docs/hub/api).
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from vram_conductor.client.hub_errors import RETRY_AFTER_S_MAX, client_missing, explained
from vram_conductor.protocol.errors import Internal, Unavailable
from vram_conductor.protocol.version import VERSION

DEFAULT_ENDPOINT = "https://huggingface.co"
ANSWER_S = 20.0
TRIES = 5
"""How often something is tried that brings nothing new."""

UNREACHED_TRIES = 2
"""The same, of a hub that has not said a word yet: most likely there is no network."""

_FILE_BYTES_MAX = 1 << 50
"""No file is larger than 1 PiB; a hub that says so is wrong."""

_T = TypeVar("_T")


class _Lfs(msgspec.Struct):
    sha256: str = ""
    size: int = 0


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Card(msgspec.Struct):
    license: str | list[str] | None = None
    license_name: str | None = None
    license_link: str | None = None


class _Gguf(msgspec.Struct):
    context_length: int | None = None


class _Model(msgspec.Struct, rename="camel"):
    id: str
    sha: str = ""
    gated: bool | str = False
    downloads: int = 0
    likes: int = 0
    tags: list[str] = []
    siblings: list[_Sibling] = []
    card_data: _Card | None = None
    gguf: _Gguf | None = None


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository: ``size`` in bytes, 0 where the hub names none that a file can have;
    ``sha256`` is empty where it names none."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Repo:
    """A repository at one commit. ``n_ctx``: what its model was trained with, if it says so."""

    name: str
    revision: str
    files: Sequence[RepoFile]
    licence: str
    licence_url: str
    gated: bool
    n_ctx: int | None


@dataclass(frozen=True)
class Found:
    """A repository that a search has found; ``downloads`` of the last month."""

    name: str
    downloads: int
    likes: int
    licence: str
    gated: bool


class Hub:
    """The hub.

    Args:
        pause: waits so many seconds before something is tried again.

    Attributes:
        endpoint: where it is, without a slash at the end.

    Raises:
        FailedPrecondition: ``hub_client_missing``.
    """

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        # It would tell the hub what else is installed here, and ask it how to tell who starts it.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            for name in ("huggingface_hub", "httpx2"):  # its versions 1 speak by another library
                importlib.import_module(name)
        except ImportError as error:
            raise client_missing(error) from None
        self.endpoint: str = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        self._pause = pause

    def repo(self, name: str, revision: str = "main") -> Repo:
        """What ``owner/name`` has.

        Raises:
            ConductorError: as :func:`explained` says; Internal ``bad_answer``.
        """
        path = f"/api/models/{name}/revision/{revision}"
        model = self._get(path, {"blobs": "true"}, _Model, name)
        card = model.card_data or _Card()
        return Repo(
            name=name,
            revision=model.sha or revision,
            files=[_file(sibling) for sibling in model.siblings],
            licence=_licence(card),
            licence_url=card.license_link or "",
            gated=bool(model.gated),
            n_ctx=model.gguf.context_length if model.gguf else None,
        )

    def search(self, words: str, limit: int) -> list[Found]:
        """The ``limit`` most downloaded repositories with GGUF files whose names have ``words``.

        Raises:
            ConductorError: as :func:`explained` says; Internal ``bad_answer``.
        """
        params = {"search": words, "filter": "gguf", "sort": "downloads", "limit": str(limit)}
        return [
            Found(
                name=model.id,
                downloads=model.downloads,
                likes=model.likes,
                licence=_tagged_licence(model.tags),
                gated=bool(model.gated),
            )
            for model in self._get("/api/models", params, list[_Model])[:limit]
        ]

    def cached(self, repo: str, revision: str, path: str) -> Path | None:
        """A file that other programs have fetched into the library's cache, as it says."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, path, revision=revision)
        return Path(found) if isinstance(found, str) else None

    def headers(self) -> dict[str, str]:
        """Who asks: this program, with the user's token if there is one."""
        from huggingface_hub import constants, get_token

        headers = {"user-agent": f"vram-conductor/{VERSION}"}
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        return headers | ({"authorization": f"Bearer {token}"} if token else {})

    def trying(self, step: Callable[[], _T], again: Callable[[Unavailable], bool]) -> _T:
        """Do ``step`` until it is done, at most TRIES times without getting anywhere.

        Args:
            again: told why it failed; True: something new had come, so the count starts anew.

        Raises:
            ConductorError: what the last try raised, and what is not ``retryable``.
        """
        tries, reached = 0, False
        while True:
            try:
                return step()
            except Unavailable as error:
                further = again(error)
                reached = reached or further or "status" in error.details
                tries = 0 if further else tries + 1
                wait_s = (error.retry_after_ms or 0) / 1000
                last = tries >= (TRIES if reached else UNREACHED_TRIES)
                if not error.retryable or last or wait_s > RETRY_AFTER_S_MAX:
                    raise
                self._pause(max(wait_s, 2.0**tries / 2))

    def _get(self, path: str, params: dict[str, str], kind: type[_T], repo: str = "") -> _T:
        from huggingface_hub import get_session, hf_raise_for_status

        def step() -> bytes:
            with explained(self.endpoint, repo):
                response = get_session().get(
                    self.endpoint + path,
                    params=params,
                    headers=self.headers(),
                    timeout=ANSWER_S,
                )
                hf_raise_for_status(response)
                return response.content

        content = self.trying(step, lambda _: False)
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Internal(
                "bad_answer",
                f"{self.endpoint}{path} does not answer as the hub does ({error}); check "
                "HF_ENDPOINT and the network: a proxy may have answered instead",
            ) from None


def _file(sibling: _Sibling) -> RepoFile:
    lfs = sibling.lfs or _Lfs()
    size = sibling.size or lfs.size
    known = 0 < size <= _FILE_BYTES_MAX
    return RepoFile(sibling.rfilename, size if known else 0, lfs.sha256)


def _licence(card: _Card) -> str:
    named = card.license[0] if isinstance(card.license, list) and card.license else card.license
    if named in (None, "other") and card.license_name:
        return card.license_name
    return named if isinstance(named, str) else ""


def _tagged_licence(tags: Sequence[str]) -> str:
    """Lists name it among the tags: ``license:apache-2.0``."""
    return next((tag.partition(":")[2] for tag in tags if tag.startswith("license:")), "")
