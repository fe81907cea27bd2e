"""Run in a network namespace of its own: makes it a host with one wire, and hands out its end.

    unshare -n python namespace_host.py FD ADDRESS

What the host sends to others can be read from the descriptor that comes over the Unix socket FD,
one IP packet at a time, and what is written there, arrives. The host is there until standard input
ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000  # linux/if_tun.h
WIRE = "wire0"


def main() -> None:
    end, address = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    wire = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", WIRE.encode(), IFF_TUN | IFF_NO_PI))
    for line in (
        "link set lo up",
        f"addr add {address}/24 dev {WIRE}",
        f"link set {WIRE} up",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    socket.send_fds(end, [b"up"], [wire])
    end.close()
    sys.stdin.read()


if __name__ == "__main__":
    main()
