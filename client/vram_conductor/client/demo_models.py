"""The models of the demo, who gets which, and what processes of their own would take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.client.demo_script import CODER, N_CTX, REVIEWER, WRITER
from vram_conductor.client.model_files import here
from vram_conductor.client.model_places import ModelPlaces, model_places
from vram_conductor.client.output import Output
from vram_conductor.client.probing import estimates, probe
from vram_conductor.client.pull import find, pull
from vram_conductor.client.text import size
from vram_conductor.protocol.catalogue import CatalogueModel
from vram_conductor.protocol.config import Config, WorkerConfig, overlay
from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, Internal

FIRST = "smollm2-135m"
SECOND = "gemma3-270m"
STAND_IN = "smollm2-135m-requantised-q8_0.gguf"
ORIGINAL = ("smollm2-360m", "qwen2-0.5b", "llama3.2-1b")
"""The three models that this project's first version was shown with, one for each agent."""

GIANT_N_CTX = 8192


@dataclass(frozen=True)
class DemoModel:
    """A model of the demo: the name to register, its file, its dry-run sizes in bytes for one
    context, and the context that it was trained with, in tokens."""

    name: str
    path: Path
    weights_bytes: int
    pool_bytes: int
    state_bytes: int
    n_ctx_train: int = GIANT_N_CTX


def cast(models: Sequence[DemoModel]) -> list[tuple[str, DemoModel]]:
    """Who gets which of two or three models. *Pure.*

    Two: coder and reviewer share the first. Three: the writer gets the largest pool and the coder
    the next, so that these two, who take turns, never fit beside each other.
    """
    if len(models) == 2:
        first, second = models
        return [(CODER, first), (REVIEWER, first), (WRITER, second)]
    writer, coder, reviewer = sorted(models, key=lambda model: -model.pool_bytes)
    return [(CODER, coder), (REVIEWER, reviewer), (WRITER, writer)]


def giant(models: Sequence[DemoModel], room_bytes: int) -> tuple[DemoModel, int]:
    """A model and a context that do not fit into ``room_bytes`` beside all weights. *Pure.*"""
    for model in sorted(models, key=lambda model: -model.state_bytes):
        n_ctx = GIANT_N_CTX
        while n_ctx <= model.n_ctx_train:
            if model.state_bytes * (n_ctx // N_CTX) > room_bytes:
                return model, n_ctx
            n_ctx *= 2
    return models[0], GIANT_N_CTX


def worker_config() -> WorkerConfig:
    """Defaults and environment; the demo has no configuration file of its own."""
    return overlay(Config(), os.environ).worker


def places(models: Sequence[DemoModel]) -> str:
    """Lines of a configuration's ``[worker]`` section: where the models are."""
    folders = sorted({str(model.path.parent) for model in models})
    config = worker_config()
    lines = (
        f"model_dirs = {json.dumps(folders)}\n"
        f"models_dir = {json.dumps(str(model_places(config).folder))}\n"
    )
    return lines + (f"catalogue = {json.dumps(config.catalogue)}\n" if config.catalogue else "")


def prepare(
    output: Output,
    say: Callable[[str], None],
    *,
    gemma: bool,
    original: bool = False,
    n_ctx: int = N_CTX,
) -> list[DemoModel]:
    """Two models, or the original's three, measured for ``n_ctx``.

    Raises:
        ConductorError: as ``pull`` and the probe; FailedPrecondition ``demo_models_missing``.
    """
    at = model_places(worker_config())
    files = _original(at, output, say) if original else _two(at, output, say, gemma)
    return _measured(files, n_ctx)


def _two(
    at: ModelPlaces, output: Output, say: Callable[[str], None], gemma: bool
) -> list[tuple[str, Path]]:
    """The first model and a second one: Gemma where it is here or was asked for (its notice is
    shown), else the first one requantised."""
    catalogue = at.files.load()
    first = find(catalogue, FIRST)
    path = _pulled(at, first, output, say, accept=False)
    say(f"{first.name}: {first.licence}")
    second = find(catalogue, SECOND)
    if gemma or at.path(second).exists():
        if at.path(second).exists():
            say(f"{second.name}: {second.notice.strip()}")
        return [(FIRST, path), (SECOND, _pulled(at, second, output, say, accept=gemma))]
    stand_in = at.folder / STAND_IN
    say(f"second model: {FIRST} requantised to Q8_0 ({SECOND} is used with --gemma)")
    if not stand_in.exists():
        part = stand_in.with_suffix(f".part-{os.getpid()}")
        try:
            probe("requantise", str(path), str(part))
            part.replace(stand_in)
        finally:
            part.unlink(missing_ok=True)
    return [(FIRST, path), (str(stand_in), stand_in)]


def _original(
    at: ModelPlaces, output: Output, say: Callable[[str], None]
) -> list[tuple[str, Path]]:
    """The original's models. Whoever asks for them by that flag accepts their licences."""
    catalogue = at.files.load()
    entries = [find(catalogue, name) for name in ORIGINAL]
    files: list[tuple[str, Path]] = []
    for entry in entries:
        say(f"{entry.name}: {entry.licence}")
        try:
            files.append((entry.name, _pulled(at, entry, output, say, accept=True)))
        except ConductorError as error:
            raise _missing(at, entries, error) from None
    return files


def _missing(
    at: ModelPlaces, entries: Sequence[CatalogueModel], error: ConductorError
) -> FailedPrecondition:
    gone = [entry for entry in entries if not here(entry, at.path(entry))]
    listed = ", ".join(f"{entry.file} ({size(entry.size)})" for entry in gone)
    return FailedPrecondition(
        "demo_models_missing",
        f"the original's models cannot be had here: {error.info.message}; missing "
        f"{'is' if len(gone) == 1 else 'are'} {listed}: bring them into {at.folder} from a "
        "machine with a network, or run: conductor demo",
        missing=[entry.name for entry in gone],
        cause=error.reason,
    )


def _pulled(
    at: ModelPlaces,
    entry: CatalogueModel,
    output: Output,
    say: Callable[[str], None],
    *,
    accept: bool,
) -> Path:
    done = pull(entry, at.folder, at.base, accept_licence=accept, say=say, progress=output.progress)
    return done.path


def _measured(files: list[tuple[str, Path]], n_ctx: int) -> list[DemoModel]:
    models: list[DemoModel] = []
    answers = estimates([path for _, path in files], n_ctx)
    for (name, path), answer in zip(files, answers, strict=True):
        if "error" in answer:
            raise Internal("estimate_failed", f"{path}: {answer['error']['message']}")
        models.append(
            DemoModel(
                name=name,
                path=path,
                weights_bytes=answer["weights_bytes"],
                pool_bytes=answer["pool_bytes"],
                state_bytes=answer["state_bytes"],
                n_ctx_train=answer["info"]["n_ctx_train"],
            )
        )
    return models
