"""Starts the ``conductor`` command; also as ``python -m vram_conductor``.

It lies outside ``client``, which brings half of the command's modules with it: a Ctrl-C while they
are imported is an interruption like any other.
"""

from __future__ import annotations

import contextlib
import os
import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Entry point; returns the exit status."""
    try:
        from vram_conductor.client.cli import main as run

        return run()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # who closed stderr wants to hear nothing
            os.write(2, b"interrupted\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
