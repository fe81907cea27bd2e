"""A server on the loopback that speaks as much of the Hugging Face hub's HTTP API as a pull needs.

Two ports, as there are two hosts: the hub's answers name a file's digest and size and redirect to
the other, which has the bytes. Faults are ordered in advance and happen in order, one per request.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from vram_conductor.client import hub as hub_module

COMMIT = "c0" * 20
TOKEN = "hf_of_somebody_who_may"


@dataclass
class Fault:
    """What goes wrong with one request: an HTTP status with headers, a connection that ends after
    so many bytes of the body, one on which nothing more comes after so many until the asker is
    gone, or bytes that are changed on the way."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cut_after: int = -1
    silent_after: int = -1
    altered: bool = False


@dataclass
class Asked:
    """A request that came: to the ``hub`` or the ``store``."""

    host: str
    method: str
    path: str
    range: str
    token: str


@dataclass
class Repository:
    """``gated``: only TOKEN may read its files."""

    files: dict[str, bytes]
    card: dict[str, Any] = field(default_factory=dict[str, Any])
    gguf: dict[str, Any] = field(default_factory=dict[str, Any])
    gated: bool = False
    downloads: int = 10
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    """What the hub says of a file's size, where that is not so."""


class HubServer:
    """Serve ``repositories`` until the block ends."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.asked: list[Asked] = []
        self.faults: dict[str, list[Fault]] = {"hub": [], "store": []}
        self.ranges = True
        self._servers: dict[str, http.server.ThreadingHTTPServer] = {}

    def __enter__(self) -> HubServer:
        for host in ("hub", "store"):
            handler = type("Handler", (_Handler,), {"owner": self, "host": host})
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
            self._servers[host] = server
            threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def url(self, host: str = "hub") -> str:
        return f"http://127.0.0.1:{self._servers[host].server_address[1]}"

    def fetched(self) -> list[str]:
        """The ranges of the requests for bytes, "" where all was asked for."""
        return [ask.range for ask in self.asked if ask.host == "store" and ask.method == "GET"]


def use_only(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """From now on the hub is this one, nobody is logged in, and nothing waits.

    Returns:
        The seconds that would have been waited.
    """
    from huggingface_hub import constants

    for name in [name for name in os.environ if name.startswith(("VRAM_CONDUCTOR_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", hub.url())
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    pauses: list[float] = []
    init = hub_module.Hub.__init__
    monkeypatch.setattr(hub_module.Hub, "__init__", lambda self: init(self, pauses.append))
    return pauses


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: HubServer
    host: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.owner.asked.append(
            Asked(self.host, self.command, self.path, self.headers.get("Range", ""), token)
        )
        waiting = self.owner.faults[self.host]
        fault = waiting.pop(0) if waiting else Fault()
        if fault.status:
            self._answer(fault.status, b"", fault.headers)
        elif self.host == "store":
            self._bytes(fault)
        elif self.path.startswith("/api/models"):
            self._api()
        else:
            self._resolve(token)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # who was interrupted reads no more
                self.wfile.write(body)

    def _refuse(self, status: int, code: str, text: str = "") -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": text})

    def _api(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if parts.path == "/api/models":
            assert query["filter"] == ["gguf"]
            words = query["search"][0].lower()
            found = [
                self._listed(name) for name in self.owner.repositories if words in name.lower()
            ]
            found.sort(key=lambda model: -model["downloads"])
            body = found[: int(query["limit"][0])]
            self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
            return
        name, _, revision = parts.path.removeprefix("/api/models/").partition("/revision/")
        repository = self.owner.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound", "Repository not found")
            return
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return
        value = self._listed(name) | {
            "sha": COMMIT,
            "cardData": repository.card,
            "siblings": [
                _sibling(path, data, repository.sizes.get(path, len(data)))
                for path, data in repository.files.items()
            ],
        }
        if repository.gguf:
            value["gguf"] = repository.gguf
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _listed(self, name: str) -> dict[str, Any]:
        repository = self.owner.repositories[name]
        licence = repository.card.get("license")
        return {
            "id": name,
            "gated": "auto" if repository.gated else False,
            "downloads": repository.downloads,
            "likes": 3,
            "private": False,
            "tags": ["gguf", *([f"license:{licence}"] if licence else [])],
        }

    def _resolve(self, token: str) -> None:
        """``/owner/name/resolve/revision/path``."""
        parts = PurePosixPath(unquote(urlsplit(self.path).path)).parts
        if len(parts) < 6 or parts[3] != "resolve":
            self._refuse(404, "")
            return
        name, revision, path = "/".join(parts[1:3]), parts[4], "/".join(parts[5:])
        repository = self.owner.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif repository.gated and token != TOKEN:
            status = 403 if token else 401
            self._refuse(status, "GatedRepo", f"Access to model {name} is restricted")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif path not in repository.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            data = repository.files[path]
            headers = {
                "Location": f"{self.owner.url('store')}/{name}/{path}?signature=abc",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "ETag": '"of the redirect"',
            }
            self._answer(302, b"", headers)

    def _bytes(self, fault: Fault) -> None:
        parts = PurePosixPath(unquote(urlsplit(self.path).path)).parts
        data = self.owner.repositories["/".join(parts[1:3])].files["/".join(parts[3:])]
        if fault.altered:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        begin, headers, status = 0, dict[str, str](), 200
        asked = self.headers.get("Range")
        if asked and self.owner.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin = int(first)
            if begin >= len(data):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            status = 206
            whole, data = len(data), data[: int(last) + 1] if last else data
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{whole}"
        body = data[begin:]
        if fault.cut_after >= 0:
            headers["Content-Length"] = str(len(body))
            body = body[: fault.cut_after]
            self.close_connection = True
        if fault.silent_after >= 0:
            self._fall_silent(status, body, headers, fault.silent_after)
            return
        self._answer(status, body, headers)

    def _fall_silent(self, status: int, body: bytes, headers: dict[str, str], after: int) -> None:
        headers["Content-Length"] = str(len(body))
        self._answer(status, body[:after], headers)
        self.connection.recv(1)
        self.close_connection = True


def _sibling(path: str, data: bytes, size: int) -> dict[str, Any]:
    value: dict[str, Any] = {"rfilename": path, "size": size, "blobId": "0" * 40}
    if path.endswith(".gguf"):
        digest = hashlib.sha256(data).hexdigest()
        value["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
    return value
