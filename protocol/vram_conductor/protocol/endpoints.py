"""Endpoint strings: what is understood, and what they mean for safety. *Pure.*"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from vram_conductor.protocol.errors import InvalidArgument

IPC_PATH_BYTES_MAX = 107
"""``sun_path`` of a UNIX socket holds 108 bytes with the closing NUL (unix(7))."""

_HELP = "write tcp://127.0.0.1:PORT, ipc:///absolute/path or inproc://name"


@dataclass(frozen=True)
class Tcp:
    """``tcp://host:port``; port 0 (or ``*``) takes a free one when bound."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.IPv4Address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def zmq_endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port or '*'}"


@dataclass(frozen=True)
class Ipc:
    """``ipc://path``, a UNIX socket in the file system."""

    path: str

    @property
    def zmq_endpoint(self) -> str:
        return f"ipc://{self.path}"


@dataclass(frozen=True)
class Inproc:
    """``inproc://name``, within one process and context."""

    name: str

    @property
    def zmq_endpoint(self) -> str:
        return f"inproc://{self.name}"


def parse_endpoint(endpoint: str) -> Tcp | Ipc | Inproc:
    """Understand an endpoint.

    Raises:
        InvalidArgument: ``bad_endpoint``, ``ipc_path_too_long``.
    """
    scheme, separator, rest = endpoint.partition("://")
    if separator and rest:
        if scheme == "tcp":
            return _tcp(endpoint, rest)
        if scheme == "ipc":
            return _ipc(endpoint, rest)
        if scheme == "inproc":
            return Inproc(rest)
    raise _bad(endpoint, _HELP)


def _tcp(endpoint: str, rest: str) -> Tcp:
    host, _, port = rest.rpartition(":")
    if host.startswith("["):
        raise _bad(endpoint, "IPv6 is switched off; use an IPv4 address")
    if not re.fullmatch(r"\*|[A-Za-z0-9._-]+", host):
        raise _bad(endpoint, _HELP)
    if not re.fullmatch(r"\*|[0-9]{1,5}", port) or (port != "*" and int(port) > 65_535):
        raise _bad(endpoint, f"{port!r} is no port; ports are 0 to 65535")
    if host == "localhost":
        host = "127.0.0.1"
    return Tcp(host, 0 if port == "*" else int(port))


def _ipc(endpoint: str, path: str) -> Ipc:
    # "@name" has no file permissions and "*" invents a path in a shared folder.
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise _bad(endpoint, "an ipc endpoint is an absolute file path: ipc:///run/…/name.ipc")
    length = len(path.encode("utf-8", "surrogateescape"))
    if length > IPC_PATH_BYTES_MAX:
        raise InvalidArgument(
            "ipc_path_too_long",
            f"the path of {endpoint} has {length} bytes, the system allows {IPC_PATH_BYTES_MAX}; "
            "choose a shorter runtime_dir",
            path_bytes=length,
            limit=IPC_PATH_BYTES_MAX,
        )
    return Ipc(path)


def _bad(endpoint: str, why: str) -> InvalidArgument:
    return InvalidArgument("bad_endpoint", f"cannot use endpoint {endpoint!r}: {why}")
