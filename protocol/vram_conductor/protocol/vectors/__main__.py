"""Write the golden vectors, or check the files: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from vram_conductor.protocol import limits
from vram_conductor.protocol.vectors.client_cases import client_vectors
from vram_conductor.protocol.vectors.invalid_cases import invalid_vectors
from vram_conductor.protocol.vectors.vector import Vector, to_json
from vram_conductor.protocol.vectors.worker_cases import worker_vectors

FOLDER = Path(__file__).resolve().parents[3] / "vectors"
FORMAT = 1


def render(vectors: Iterable[Vector]) -> str:
    """The text of one file: one vector a line, so that a change shows as that line."""
    version = [limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR]
    lines = [json.dumps(to_json(vector), ensure_ascii=False) for vector in vectors]
    body = ",\n".join(lines)
    return f'{{"format": {FORMAT}, "protocol": {version}, "vectors": [\n{body}\n]}}\n'


def files() -> dict[str, str]:
    """File name → text."""
    return {
        "client.json": render(client_vectors()),
        "worker.json": render(worker_vectors()),
        "invalid.json": render(invalid_vectors()),
    }


def stale(folder: Path) -> list[str]:
    """Names of the files in ``folder`` that are not what the code says."""
    return [
        name
        for name, text in files().items()
        if not (folder / name).exists() or (folder / name).read_text("utf-8") != text
    ]


def main(arguments: list[str] | None = None) -> int:
    """0: written, or up to date. 1: ``--check`` found a difference."""
    parser = argparse.ArgumentParser(prog="vectors", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: protocol/vectors")
    options = parser.parse_args(arguments)
    if options.check:
        differing = stale(options.folder)
        if differing:
            sys.stderr.write(
                f"golden vectors differ from the code: {', '.join(differing)}; if the protocol "
                "was meant to change, run `make vectors` and read the diff\n"
            )
        return 1 if differing else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (options.folder / name).write_text(text, "utf-8")
        sys.stdout.write(f"{options.folder / name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
