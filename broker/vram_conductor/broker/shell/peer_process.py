"""The other end of a connection that libzmq owns, as the kernel knows it."""

from __future__ import annotations

import os
import select
import socket
import struct

_UCRED = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""


def pid_of(fd: int) -> int:
    """Process id of who connected ``fd``; 0 where there is none to be known: another kind of
    socket, a process outside of our pid namespace, a descriptor that is closed by now."""
    try:
        with socket.socket(fileno=os.dup(fd)) as peer:
            if peer.family != socket.AF_UNIX:
                return 0
            told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        return 0
    return int(_UCRED.unpack(told)[0])


def address_of(fd: int) -> object:
    """Address and port at the other end of a TCP connection; None for any other descriptor."""
    try:
        with socket.socket(fileno=os.dup(fd)) as peer:
            return _address(peer)
    except OSError:
        return None


def hang_up(fd: int, address: object) -> None:
    """Shut the TCP connection to ``address`` down; libzmq notices and closes it. Nothing happens
    if the number ``fd`` has been given to another connection since."""
    try:
        with socket.socket(fileno=os.dup(fd)) as peer:
            if address is not None and _address(peer) == address:
                peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _address(peer: socket.socket) -> object:
    return peer.getpeername() if peer.family == socket.AF_INET else None


def has_ended(pid: int) -> bool:
    """Whether the process is certainly over, reaped by its parent or not. A number that another
    process has been given since, or that we may not ask about, is not."""
    if pid <= 0:
        return False
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)
