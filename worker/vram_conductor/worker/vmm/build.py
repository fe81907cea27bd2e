"""Compiles the preload library: ``python -m vram_conductor.worker.vmm.build`` prints its path.

The result lies in the virtual environment, or where there is none, in the user's cache: the
package's own folder may be read-only, or shared by machines. Its name holds a digest of all that
it depends on (source, C library, machine), so it is never stale, and two machines that share a
home folder do not take each other's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vram_conductor.protocol.errors import ConductorError, FailedPrecondition

_PARTS = ("vmm", "sleep", "backup", "block", "tag", "host", "driver", "runtime", "gather", "way")
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in _PARTS)
HEADERS = tuple(
    Path(__file__).with_name(f"{name}.h") for name in ("vmm", "tag", "host", "driver", "way")
)
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-fPIC", "-shared", "-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra")
LIBRARIES = ("-pthread", "-ldl")
COMPILE_S = 120.0

_UNFIT = (" ", "\t", "\n", ":")
"""``LD_PRELOAD`` separates by these and knows no quoting."""


def file_name() -> str:
    """Of the library for this source, C library and machine."""
    digest = hashlib.blake2b(digest_size=8)
    files = [path.read_bytes() for path in (*SOURCES, *HEADERS)]
    for part in (*files, " ".join((*FLAGS, *LIBRARIES)).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(f"{platform.machine()} {'-'.join(platform.libc_ver())}".encode())
    return f"vmm-{digest.hexdigest()}.so"


def folders(env: Mapping[str, str]) -> list[Path]:
    """Where it may lie, the best first; none where every path is one that cannot be preloaded."""
    cache = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    found = [cache / "vram-conductor" / "vmm"]
    if sys.prefix != sys.base_prefix:
        found.insert(0, Path(sys.prefix) / "lib" / "vram-conductor")
    return [path for path in found if not any(sign in str(path) for sign in _UNFIT)]


def compiled(env: Mapping[str, str]) -> Path | None:
    """The library, if it has been compiled for this machine."""
    name = file_name()
    return next((path / name for path in folders(env) if (path / name).is_file()), None)


def build(env: Mapping[str, str]) -> Path:
    """Compile the library, unless it is there.

    Raises:
        FailedPrecondition: ``no_compiler``; ``compile_failed``: the compiler's last words, or no
            folder to write to.
    """
    if path := compiled(env):
        return path
    command = compiler(env)
    places = folders(env)
    if not places:
        raise FailedPrecondition(
            "compile_failed",
            "the preload library cannot lie in a path with a space or a colon: set "
            "XDG_CACHE_HOME to another one",
        )
    problem: OSError | None = None
    for folder in places:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _compile(command, folder)
        except OSError as error:
            problem = error
    raise FailedPrecondition(
        "compile_failed",
        f"the preload library cannot be written to {places[-1]}: "
        f"{problem.strerror if problem else 'no folder'}; set XDG_CACHE_HOME to another one",
    )


def compiler(env: Mapping[str, str]) -> list[str]:
    """``$CC``, which may have arguments, or the first compiler that is there.

    Raises:
        FailedPrecondition: ``no_compiler``.
    """
    given = shlex.split(env.get("CC", ""))
    for command in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(command[0], path=env.get("PATH")):
            return command
    raise FailedPrecondition(
        "no_compiler",
        f"no C compiler ({given[0] if given else ', '.join(COMPILERS)}) to compile the preload "
        "library with; Debian, Ubuntu: apt-get install gcc; Fedora: dnf install gcc; then: "
        "python -m vram_conductor.worker.vmm.build",
    )


def _compile(command: list[str], folder: Path) -> Path:
    """Whole or not at all: another worker may be starting with the file just now.

    Raises:
        OSError: the folder cannot be written.
        FailedPrecondition: ``compile_failed``.
    """
    number, part = tempfile.mkstemp(suffix=".part", dir=folder)
    os.close(number)
    try:
        done = subprocess.run(
            [*command, *FLAGS, *map(str, SOURCES), "-o", part, *LIBRARIES],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_S,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            last = (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
            raise FailedPrecondition(
                "compile_failed", f"{command[0]} cannot compile the preload library: {last}"
            )
        Path(part).chmod(0o755)
        return Path(part).replace(folder / file_name())
    except subprocess.TimeoutExpired:
        raise FailedPrecondition(
            "compile_failed", f"{command[0]} did not end within {COMPILE_S:.0f} s"
        ) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(part).unlink()


def main() -> int:
    """Entry point: 0 and the path, or 1 and why not."""
    try:
        sys.stdout.write(f"{build(os.environ)}\n")
    except ConductorError as error:
        sys.stderr.write(f"{error.info.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
