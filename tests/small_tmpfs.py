"""A file system that is full soon."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_tmpfs(folder: Path, size_bytes: int) -> Generator[Path]:
    """A tmpfs of so many bytes below ``folder``; skips the test where none can be mounted."""
    mount = folder / "tmpfs"
    mount.mkdir()
    options = f"size={size_bytes},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
