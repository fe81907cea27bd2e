"""Static types: basedpyright over everything, and whether all that is public is typed.

    python scripts/check_types.py

The second check (``--verifytypes``) looks at a package as its users have it, below one folder. Here
its parts lie below four, so they are put together with links.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PARTS = ("protocol", "client", "broker", "worker")
PUBLIC = ("vram_conductor.protocol", "vram_conductor.client")
TIMEOUT_S = 600


def check(root: Path) -> int:
    """The checker's exit code for the project at ``root``; it prints what it found."""
    return subprocess.run([BIN / "basedpyright"], cwd=root, timeout=TIMEOUT_S).returncode


def gather(root: Path, folder: Path) -> None:
    """Make ``folder/vram_conductor`` of links to the parts of the project."""
    package = folder / "vram_conductor"
    package.mkdir()
    for part in PARTS:
        (package / part).symlink_to(root / part / "vram_conductor" / part)


def gaps(folder: Path, package: str) -> list[str]:
    """What of a package below ``folder`` a user's checker could not know or might infer otherwise:
    ``name: why``. Types of other projects do not count.

    Raises:
        SystemExit: the package was not looked at.
    """
    # The checker asks the first ``python`` of the path where packages are.
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    command: list[str | Path] = [
        BIN / "basedpyright",
        "--outputjson",
        "--ignoreexternal",
        "--verifytypes",
        package,
    ]
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    try:
        report = json.loads(done.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        sys.exit(f"check_types: no report on {package}: {done.stdout[:500]}")
    counts = report["exportedSymbolCounts"]
    if not sum(counts.values()):
        sys.exit(f"check_types: {package} was not found: {done.stdout[:500]}")
    found = list(_found(report["symbols"]))
    if not found and counts["withAmbiguousType"] + counts["withUnknownType"]:
        found.append(f"{package}: {counts}")
    return found


def _found(symbols: list[dict[str, Any]]) -> Iterator[str]:
    for symbol in symbols:
        if symbol["isExported"]:
            for note in symbol["diagnostics"]:
                if note["severity"] == "error":
                    yield f"{symbol['name']}: {' '.join(note['message'].split())}"


def main() -> int:
    code = check(ROOT)
    with tempfile.TemporaryDirectory() as name:
        gather(ROOT, Path(name))
        found = [line for package in PUBLIC for line in gaps(Path(name), package)]
    for line in found:
        print(line)
    print(f"{' and '.join(PUBLIC)}: {len(found)} gaps in the types of what is public")
    return code or bool(found)


if __name__ == "__main__":
    sys.exit(main())
