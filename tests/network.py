"""Hosts in network namespaces of their own, and the wires between them: slow, lossy, cut.

The kernel's own emulation (netem) is not everywhere, so packets go through this process: each host
has a TUN device, and a thread carries what it sends to the others. Nothing of the machine's own
network is touched; all is gone with the processes.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

HOLDER = Path(__file__).with_name("namespace_host.py")
PACKET_BYTES_MAX = 65_535
DESTINATION = slice(16, 20)
"""Of an IPv4 packet (RFC 791)."""


@dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes:
        enter: what a command begins with to run there.
    """

    name: str
    address: str
    enter: tuple[str, ...]
    wire: int


class Network:
    """Hosts that reach each other.

    Args:
        seed: of what is lost and how long it takes.
        delay_ms: how long each packet travels; ``jitter_ms``: up to so much longer, so that packets
            overtake each other.
        loss: part of the packets that get lost.

    Attributes:
        carried, lost: packets so far.

    Raises:
        OSError, subprocess.SubprocessError: this is not permitted here; see ``why_not``.
    """

    def __init__(
        self, seed: int = 1, *, delay_ms: float = 0, jitter_ms: float = 0, loss: float = 0
    ) -> None:
        self.delay_ms, self.jitter_ms, self.loss = delay_ms, jitter_ms, loss
        self.carried = self.lost = 0
        self._draw = random.Random(seed)
        self._hosts: dict[bytes, Host] = {}
        self._cut: set[str] = set()
        self._under_way: list[tuple[float, int, Host, bytes]] = []
        self._stack = ExitStack()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._over = False
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)
        self._thread.start()

    def host(self, name: str) -> Host:
        """A new host."""
        address = f"10.77.0.{len(self._hosts) + 1}"
        user = os.getuid() != 0
        ours, theirs = socket.socketpair()
        with ours, theirs:
            unshare = ["unshare", "-rn" if user else "-n"]
            holder = subprocess.Popen(
                [*unshare, sys.executable, str(HOLDER), str(theirs.fileno()), address],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
            self._stack.callback(_end, holder)
            theirs.close()
            ours.settimeout(30)
            data, wires, _, _ = socket.recv_fds(ours, 2, 1)
        if not data:
            assert holder.stderr is not None
            raise OSError(holder.stderr.read().decode().strip().rpartition("\n")[2])
        self._stack.callback(os.close, wires[0])
        os.set_blocking(wires[0], False)
        as_user = ("-U", "--preserve-credentials") if user else ()
        enter = ("nsenter", "-t", str(holder.pid), *as_user, "-n", "--")
        found = Host(name, address, enter, wires[0])
        self._hosts[socket.inet_aton(address)] = found
        os.eventfd_write(self._wake_fd, 1)
        return found

    def cut(self, host: Host) -> None:
        """From now on nothing reaches this host, and nothing leaves it."""
        self._cut.add(host.name)

    def heal(self, host: Host) -> None:
        self._cut.discard(host.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(10)
        self._stack.close()
        os.close(self._wake_fd)

    # --- the thread ---

    def _carry(self) -> None:
        while not self._over:
            hosts = {host.wire: host for host in list(self._hosts.values())}
            due = self._under_way[0][0] - time.monotonic() if self._under_way else None
            wait_s = None if due is None else max(0.0, due)
            for fd in select.select([self._wake_fd, *hosts], [], [], wait_s)[0]:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                else:
                    self._take(hosts[fd])
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._under_way)
                self._give(target, packet)

    def _take(self, source: Host) -> None:
        try:
            packet = os.read(source.wire, PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        target = self._hosts.get(packet[DESTINATION])
        if target is None:  # IPv6's chatter, multicast
            return
        if source.name in self._cut or self._draw.random() < self.loss:
            self.lost += 1
            return
        delay_ms = self.delay_ms + self._draw.random() * self.jitter_ms
        self.carried += 1
        entry = (time.monotonic() + delay_ms / 1000, self.carried, target, packet)
        heapq.heappush(self._under_way, entry)

    def _give(self, target: Host, packet: bytes) -> None:
        if target.name in self._cut:
            self.lost += 1
            return
        try:
            os.write(target.wire, packet)
        except OSError:  # its queue is full, or it is just going down: a network loses packets
            self.lost += 1


def why_not() -> str:
    """Why there can be no such network here; empty: there can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    try:
        with Network() as network:
            network.host("trial")
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces with a TUN device are not permitted here: {error}"
    return ""


def _end(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    assert holder.stderr is not None
    holder.stdin.close()
    try:
        holder.wait(10)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait(10)
    holder.stderr.close()
