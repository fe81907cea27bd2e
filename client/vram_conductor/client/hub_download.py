"""Fetches a file from the Hugging Face hub; what has come is kept, and the next run goes on there.

The library's own ``hf_hub_download`` begins anew after an interruption (as of 2.4 its partial file
has a name of its own for each call), so the ranges are asked for here, through its session.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vram_conductor.client.hub import ANSWER_S, Hub
from vram_conductor.client.hub_errors import explained
from vram_conductor.client.text import size
from vram_conductor.protocol.catalogue import HubFile
from vram_conductor.protocol.errors import DataLoss, Unavailable

if TYPE_CHECKING:
    from httpx2 import Response

CHUNK_BYTES = 1 << 16
_PARTIAL = 206
_BEYOND_THE_END = 416


class Download:
    """Of one file.

    Args:
        hub: where it is.
        repo: ``owner/name``; ``revision``: a commit, a branch or a tag.
        file: its path there, and what its content must be.
        target: where it goes; what is there already is its beginning.
        say: told what a user should know.
        fetched: called now and then with the bytes that are there.
        most: only the beginning, of at least so many bytes; None: all of it.
    """

    def __init__(
        self,
        hub: Hub,
        repo: str,
        revision: str,
        file: HubFile,
        target: Path,
        *,
        say: Callable[[str], None],
        fetched: Callable[[int], None],
        most: int | None = None,
    ) -> None:
        self._hub = hub
        self._repo = repo
        self._revision = revision
        self._file = file
        self._target = target
        self._say = say
        self._fetched = fetched
        self._end = file.size if most is None else min(most, file.size)
        self._best = self._have()

    def run(self) -> None:
        """Fetch what is missing. The content is not looked at: whoever called does that.

        Raises:
            ConductorError: as ``hub_errors.explained`` says.
            DataLoss: ``model_corrupt``: the hub says that the file is another one by now, or
                sends more than it has.
            OSError: of the target.
        """
        if self._have() > self._file.size:
            self._target.unlink()
        if self._have():
            self._say(f"going on at {size(self._have())} of {size(self._file.size)}")
        if self._have() < self._end:
            self._hub.trying(self._fetch, self._broken)

    def _have(self) -> int:
        try:
            return self._target.stat().st_size
        except FileNotFoundError:
            return 0

    def _broken(self, error: Unavailable) -> bool:
        """The connection ended early, or there was none; True if something had come."""
        have = self._have()
        further, self._best = have > self._best, max(self._best, have)
        if further:
            self._say(f"{error.info.message.partition(';')[0]}: going on at {size(have)}")
        return further

    def _fetch(self) -> None:
        from huggingface_hub import get_session, hf_raise_for_status

        url, headers = self._locate()
        have = self._have()
        if have or self._end < self._file.size:
            last = self._end - 1 if self._end < self._file.size else ""
            headers["Range"] = f"bytes={have}-{last}"
        with (
            explained(self._hub.endpoint, self._repo),
            get_session().stream("GET", url, headers=headers, timeout=ANSWER_S) as response,
        ):
            if response.status_code == _BEYOND_THE_END:
                self._target.unlink()  # the file there is shorter than what we have of it
                raise self._other("the file there is shorter")
            hf_raise_for_status(response)
            self._write(response, have if response.status_code == _PARTIAL else 0)
        if self._have() < self._end:
            raise Unavailable(
                "hub_unavailable",
                f"{self._hub.endpoint} sent {self._have()} of {self._end} bytes; run it "
                "again: what has come is kept",
                retryable=True,
            )

    def _locate(self) -> tuple[str, dict[str, str]]:
        """Where the bytes are, and the headers to ask for them with."""
        from huggingface_hub import (
            get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType] - a bare dict
            hf_hub_url,
        )

        path, revision, endpoint = self._file.path, self._revision, self._hub.endpoint
        url = hf_hub_url(self._repo, path, revision=revision, endpoint=endpoint)
        with explained(endpoint, self._repo):
            found = get_hf_file_metadata(url, timeout=ANSWER_S, endpoint=endpoint)
        # The etag of a large file is the sha256 of its content.
        wanted = self._file.sha256
        if found.etag and len(found.etag) == len(wanted) and found.etag != wanted:
            raise self._other(f"sha256 {found.etag} instead of {wanted}")
        if found.size is not None and found.size != self._file.size:
            raise self._other(f"{found.size} bytes instead of {self._file.size}")
        headers = self._hub.headers() | {"accept-encoding": "identity"}
        if not found.location.startswith(f"{endpoint}/"):
            # The bytes lie with somebody else, under a signed address: the token is not for him.
            headers.pop("authorization", None)
        return found.location, headers

    def _write(self, response: Response, begin: int) -> None:
        mode = "r+b" if begin else "wb"
        with self._target.open(mode) as out:
            out.seek(begin)
            done = begin
            for chunk in response.iter_bytes(CHUNK_BYTES):
                done += len(chunk)
                if done > self._file.size:
                    out.truncate(0)
                    raise self._other(f"more than {self._file.size} bytes")
                out.write(chunk)
                self._fetched(done)
                if done >= self._end:
                    break  # of a server that knows no ranges

    def _other(self, what: str) -> DataLoss:
        return DataLoss(
            "model_corrupt",
            f"{self._repo} has another {self._file.path} now: {what}; run it again, and if that "
            "does not help, add the model anew: conductor models add --replace",
            path=self._file.path,
        )
