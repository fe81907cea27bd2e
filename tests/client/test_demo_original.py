"""The demo with three models from the hub: who gets which, and what is said where there is none."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, Repository

from vram_conductor.client import cli, cli_demo, demo_models
from vram_conductor.client.demo_models import (
    ORIGINAL,
    STAND_IN,
    DemoModel,
    cast,
    giant,
    places,
)
from vram_conductor.client.own_catalogue import entry_text
from vram_conductor.client.probing import probe
from vram_conductor.protocol.catalogue import CatalogueModel, HubFile, HubSource, load_catalogue
from vram_conductor.protocol.config import load_config

MIB = 1 << 20
REPO = "somebody/three-GGUF"


def model(name: str, pool: int, state: int = 1, trained: int = 8192) -> DemoModel:
    return DemoModel(name, Path(f"/{name}.gguf"), 90 * MIB, pool * MIB, state * MIB, trained)


def test_who_takes_turns_never_fits_beside_each_other() -> None:
    small, large, middle = model("small", 29), model("large", 84), model("middle", 69)
    given = cast([small, large, middle])
    assert [agent for agent, _ in given] == ["coder", "reviewer", "writer"]
    assert [each.name for _, each in given] == ["middle", "small", "large"]
    assert cast([small, large])[1] == ("reviewer", small)


def test_the_giant_never_fits() -> None:
    first = model("first", 47, state=45)
    assert giant([first, model("other", 21, state=14)], 55 * MIB) == (first, 8192)
    # What it was trained with is a limit, too, and its refusal another one.
    short, long = model("short", 20, state=19), model("long", 19, state=18, trained=1 << 17)
    assert giant([short, long], 30 * MIB) == (short, 8192)
    assert giant([short, long], 100 * MIB) == (long, 1 << 14)


def test_the_catalogue_has_the_originals() -> None:
    catalogue = load_catalogue()
    entries = [catalogue.find(name) for name in ORIGINAL]
    files = [entry.file.lower() for entry in entries if entry]
    assert len(files) == 3
    assert all("q4_k_m" in file for file in files)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is here, and no network; the models folder."""
    for name in [name for name in os.environ if name.startswith(("VRAM_CONDUCTOR_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(cli_demo, "check_worker_packages", lambda: None)
    return tmp_path / "models"


def test_without_a_network_it_says_what_is_missing(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["demo", "--original"]) != 0
    err = capsys.readouterr().err
    assert "(demo_models_missing)" in err
    assert "HF_HUB_OFFLINE is set" in err
    for text in ("SmolLM2-360M-Instruct-Q4_K_M.gguf (258 MiB)", "(379 MiB)", "(770 MiB)"):
        assert text in err
    assert str(alone) in err
    assert list(alone.iterdir()) == []


def test_gemma_and_original_exclude_each_other(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--gemma", "--original"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_the_places_name_a_catalogue_only_if_one_is_set(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f"[worker]\n{places([model('m', 1)])}")
    assert load_config(config).worker.catalogue == ""
    monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_CATALOGUE", "/some/models.toml")
    config.write_text(f"[worker]\n{places([model('m', 1)])}")
    assert load_config(config).worker.catalogue == "/some/models.toml"


@pytest.mark.real
@pytest.mark.slow
def test_three_models_from_the_hub_and_every_claim_holds(
    smollm2: Path, gemma3: Path, tmp_path: Path
) -> None:
    """The names of the original's, with the contents of smaller ones."""
    requantised = smollm2.with_name(STAND_IN)
    if not requantised.exists():
        requantised = tmp_path / "q8_0.gguf"
        probe("requantise", str(smollm2), str(requantised))
    contents = dict(zip(ORIGINAL, (smollm2, requantised, gemma3), strict=True))
    entries: list[CatalogueModel] = []
    for name, path in contents.items():
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        source = HubSource(
            repo=REPO, files=[HubFile(path=f"{name}.gguf", sha256=digest, size=len(data))]
        )
        entries.append(
            CatalogueModel(
                name=name, file=f"{name}.gguf", sha256=digest, size=len(data), source=source
            )
        )
    catalogue = tmp_path / "models.toml"
    catalogue.write_text("\n".join(map(entry_text, entries)))
    files = {f"{name}.gguf": path.read_bytes() for name, path in contents.items()}
    with HubServer({REPO: Repository(files)}) as hub:
        done = subprocess.run(
            [sys.executable, "-m", "vram_conductor.client.cli", "demo", "--original"],
            capture_output=True,
            text=True,
            timeout=600,
            env={
                **os.environ,
                "HF_ENDPOINT": hub.url(),
                "VRAM_CONDUCTOR_WORKER_CATALOGUE": str(catalogue),
                "VRAM_CONDUCTOR_WORKER_MODELS_DIR": str(tmp_path / "models"),
                "COLUMNS": "100",
            },
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("13 of 13 claims hold")
    assert "3 copies for 3 agents" in done.stdout
    assert len(hub.fetched()) == 3
    assert demo_models.ORIGINAL[0] in done.stdout
