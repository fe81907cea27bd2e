"""The two models of the demo, and what three processes of their own would take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.client.output import Output
from vram_conductor.client.probing import estimates, probe
from vram_conductor.client.pull import find, pull
from vram_conductor.protocol.catalogue import load_catalogue, model_path, packaged_catalogue
from vram_conductor.protocol.config import Config, WorkerConfig, models_dir, overlay
from vram_conductor.protocol.errors import Internal

FIRST = "smollm2-135m"
SECOND = "gemma3-270m"
STAND_IN = "smollm2-135m-requantised-q8_0.gguf"


@dataclass(frozen=True)
class DemoModel:
    """A model of the demo: the name to register, its file, its dry-run sizes in bytes."""

    name: str
    path: Path
    weights_bytes: int
    pool_bytes: int
    state_bytes: int


def worker_config() -> WorkerConfig:
    """Defaults and environment; the demo has no configuration file of its own."""
    return overlay(Config(), os.environ).worker


def catalogue_file() -> Path:
    """The catalogue in use."""
    named = worker_config().catalogue
    return Path(named) if named else packaged_catalogue()


def places(models: Sequence[DemoModel]) -> str:
    """Lines of a configuration's ``[worker]`` section: where the models are."""
    folders = sorted({str(model.path.parent) for model in models})
    return (
        f"model_dirs = {json.dumps(folders)}\n"
        f"models_dir = {json.dumps(str(models_dir(worker_config())))}\n"
        f"catalogue = {json.dumps(str(catalogue_file()))}\n"
    )


def prepare(output: Output, say: Callable[[str], None], n_ctx: int, gemma: bool) -> list[DemoModel]:
    """The first model and a second one: Gemma where it is here or was asked for (its notice is
    shown), else the first one requantised.

    Raises:
        ConductorError: as ``pull`` and the probe.
    """
    file = catalogue_file()
    catalogue, folder, base = load_catalogue(file), models_dir(worker_config()), file.parent
    first = find(catalogue, FIRST)
    pulled = pull(first, folder, base, accept_licence=False, say=say, progress=output.progress)
    say(f"{first.name}: {first.licence}")
    second = find(catalogue, SECOND)
    path = model_path(second, folder, base)
    if gemma or path.exists():
        if path.exists():
            say(f"{second.name}: {second.notice.strip()}")
        path = pull(
            second, folder, base, accept_licence=gemma, say=say, progress=output.progress
        ).path
        name = second.name
    else:
        path = folder / STAND_IN
        name = str(path)
        say(f"second model: {FIRST} requantised to Q8_0 ({SECOND} is used with --gemma)")
        if not path.exists():
            part = path.with_suffix(f".part-{os.getpid()}")
            try:
                probe("requantise", str(pulled.path), str(part))
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    return _measured([(FIRST, pulled.path), (name, path)], n_ctx)


def _measured(files: list[tuple[str, Path]], n_ctx: int) -> list[DemoModel]:
    models: list[DemoModel] = []
    answers = estimates([path for _, path in files], n_ctx)
    for (name, path), answer in zip(files, answers, strict=True):
        if "error" in answer:
            raise Internal("estimate_failed", f"{path}: {answer['error']['message']}")
        sizes = [answer[key] for key in ("weights_bytes", "pool_bytes", "state_bytes")]
        models.append(DemoModel(name, path, *sizes))
    return models
