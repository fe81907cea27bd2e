"""A worker that runs knows a model as soon as its user's catalogue does."""

from __future__ import annotations

from pathlib import Path

import pytest

from vram_conductor.client.own_catalogue import OwnCatalogue
from vram_conductor.protocol.catalogue import CatalogueModel, PathSource
from vram_conductor.protocol.config import WorkerConfig
from vram_conductor.protocol.errors import InvalidArgument, NotFound
from vram_conductor.worker.app import open_resolver


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnCatalogue:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return OwnCatalogue(tmp_path / "vram-conductor" / "models.toml")


def test_what_was_added_and_removed_meanwhile_counts(own: OwnCatalogue, tmp_path: Path) -> None:
    resolver = open_resolver(WorkerConfig(models_dir=str(tmp_path / "models")))
    with pytest.raises(NotFound) as caught:
        resolver.resolve("mine", bare_path=False)
    assert caught.value.reason == "no_such_model"
    path = tmp_path / "elsewhere.gguf"
    path.write_bytes(b"GGUF")
    own.put(
        CatalogueModel(
            name="mine",
            file=path.name,
            source=PathSource(path=str(path)),
            sha256="ab" * 32,
            size=4,
        )
    )
    assert resolver.resolve("mine", bare_path=False) == path
    assert resolver.expected_sha256(path) == "ab" * 32
    own.path.write_text("[[model]]\nname = 5\n")
    assert resolver.resolve("mine", bare_path=False) == path, "a slip of the pen breaks nothing"
    own.path.unlink()
    with pytest.raises(NotFound):
        resolver.resolve("mine", bare_path=False)


def test_a_broken_catalogue_is_said_at_the_start(own: OwnCatalogue) -> None:
    own.path.parent.mkdir()
    own.path.write_text("[[model]]\nname = 5\n")
    with pytest.raises(InvalidArgument) as caught:
        open_resolver(WorkerConfig())
    assert caught.value.reason == "bad_catalogue"
    assert str(own.path) in caught.value.info.message
