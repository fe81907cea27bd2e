"""Where the models of a configuration are named, and where their files lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.client.defaults import find_config
from vram_conductor.protocol.catalogue import CatalogueModel, model_path
from vram_conductor.protocol.catalogue_files import CatalogueFiles
from vram_conductor.protocol.config import WorkerConfig, load_config, models_dir, overlay


@dataclass(frozen=True)
class ModelPlaces:
    """The catalogue, and the folder of what was pulled."""

    files: CatalogueFiles
    folder: Path

    @property
    def base(self) -> Path:
        """What relative paths start from: none is, see :class:`CatalogueFiles`."""
        return self.files.own.parent

    def path(self, entry: CatalogueModel) -> Path:
        """Of the first file of ``entry``, whether it is there or not."""
        return model_path(entry, self.folder, self.base)


def model_places(worker: WorkerConfig) -> ModelPlaces:
    """What a worker of this configuration uses."""
    return ModelPlaces(CatalogueFiles(worker, os.environ), models_dir(worker))


def configured_places(given: str | None) -> ModelPlaces:
    """The same, by the configuration file that was ``given`` or is found."""
    return model_places(overlay(load_config(find_config(given)), os.environ).worker)
