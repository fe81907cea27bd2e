"""Endpoint strings."""

import pytest

from vram_conductor.protocol.endpoints import (
    IPC_PATH_BYTES_MAX,
    Inproc,
    Ipc,
    Tcp,
    parse_endpoint,
)
from vram_conductor.protocol.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("tcp://127.0.0.1:5555", Tcp("127.0.0.1", 5555)),
        ("tcp://localhost:0", Tcp("127.0.0.1", 0)),
        ("tcp://127.0.0.1:*", Tcp("127.0.0.1", 0)),
        ("tcp://*:5555", Tcp("*", 5555)),
        ("tcp://gpu-box.example:5555", Tcp("gpu-box.example", 5555)),
        ("ipc:///run/x/c.ipc", Ipc("/run/x/c.ipc")),
        ("inproc://test", Inproc("test")),
    ],
)
def test_understood(text: str, parsed: Tcp | Ipc | Inproc) -> None:
    assert parse_endpoint(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5555",
        "127.0.0.1:5555",
        "udp://127.0.0.1:1",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:http",
        "tcp://:5555",
        "tcp://[::1]:5555",
        "tcp://eth0;127.0.0.1:5555",
        "ipc://",
        "ipc://relative/path",
        "ipc://@abstract",
        "ipc://*",
        "ipc:///folder/",
        "ipc:///a\0b",
    ],
)
def test_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_endpoint(text)
    assert caught.value.reason == "bad_endpoint"


def test_the_longest_ipc_path() -> None:
    longest = "/" + "x" * (IPC_PATH_BYTES_MAX - 1)
    assert parse_endpoint("ipc://" + longest) == Ipc(longest)
    with pytest.raises(InvalidArgument) as caught:
        parse_endpoint("ipc:///" + "é" * 54)
    assert caught.value.reason == "ipc_path_too_long"
    assert caught.value.details == {"path_bytes": 109, "limit": 107}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("0.0.0.0", False),
        ("*", False),
        ("192.168.1.5", False),
        ("127.0.0.1.example", False),
        ("lo", False),
    ],
)
def test_only_loopback_addresses_are_loopback(host: str, loopback: bool) -> None:
    assert Tcp(host, 1).loopback is loopback
