"""What fits of a model that was not pulled: from the headers that the hub has, by the real path."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import Spec, make_parts
from hub_server import COMMIT, HubServer, Repository, use_only
from scene import MIB, SMOL, Scene

from vram_conductor.client import cli, fit_unpulled
from vram_conductor.client.model_places import configured_places
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.split_files import combined_sha256

REPO = "somebody/Models-GGUF"


def entry(name: str, files: dict[str, bytes]) -> str:
    """Its lines in a catalogue."""
    digests = [hashlib.sha256(data).hexdigest() for data in files.values()]
    listed = ", ".join(
        f'{{ path = "{path}", sha256 = "{digest}", size = {len(data)} }}'
        for (path, data), digest in zip(files.items(), digests, strict=True)
    )
    return "\n".join(
        [
            "[[model]]",
            f'name = "{name}"',
            f'file = "{next(iter(files)).rpartition("/")[2]}"',
            f'sha256 = "{combined_sha256(digests)}"',
            f"size = {sum(map(len, files.values()))}",
            f'source = {{ kind = "huggingface", repo = "{REPO}", revision = "{COMMIT}", '
            f"files = [{listed}] }}",
            "",
        ]
    )


@pytest.fixture(scope="module")
def smol() -> Path:
    places = configured_places(None)
    found = places.files.load().find(SMOL)
    assert found is not None
    return places.path(found)


@pytest.fixture
def hub(
    smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HubServer, Scene]]:
    """A hub with a model in one file and one in parts; a worker whose catalogue names both."""
    parts = make_parts(Spec(vocab="bytes", seed=31), tmp_path)
    split = {f"big/{part.name}": part.read_bytes() for part in parts}
    whole = {"whole.gguf": smol.read_bytes()}
    catalogue = tmp_path / "models.toml"
    catalogue.write_text(entry("whole", whole) + entry("split", split))
    for folder in ("empty", "temporary"):
        (tmp_path / folder).mkdir()
    folders = f'catalogue = "{catalogue}"\nmodels_dir = "{tmp_path / "empty"}"'
    box = StageDevice(capacity_bytes=200 * MIB, host_cap_bytes=1024 * MIB)
    with (
        HubServer({REPO: Repository(whole | split)}) as server,
        Scene(box, worker=folders) as scene,
    ):
        use_only(server, tmp_path, monkeypatch)
        monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_CATALOGUE", str(catalogue))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        yield server, scene


def fit(scene: Scene, model: str, capsys: Any) -> Any:
    assert cli.main(["models", "fit", model, "--json", "--clients", scene.stage.endpoint]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.real
@pytest.mark.parametrize("first", [4096, 8 * MIB])
def test_the_headers_say_what_the_whole_file_says(
    hub: tuple[HubServer, Scene],
    smol: Path,
    tmp_path: Path,
    first: int,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, scene = hub
    monkeypatch.setattr(fit_unpulled, "BEGINNINGS_BYTES", (first, 9 * MIB))
    found = fit(scene, "whole", capsys)
    # Where the first beginning is too short, the next goes on behind it.
    expected = [f"bytes=0-{first - 1}"]
    assert server.fetched() == expected + ([f"bytes=4096-{9 * MIB - 1}"] if first == 4096 else [])
    assert found["model"] == "whole"
    assert found["file_bytes"] == smol.stat().st_size
    real = fit(scene, str(smol), capsys)
    assert found["rows"] == real["rows"]
    assert {row["limit"] for row in real["rows"]} == {"device", "training"}
    assert not list((tmp_path / "temporary").iterdir())
    assert not list((tmp_path / "empty").iterdir())


def test_parts_are_outlined_too_and_the_next_step_is_named(
    hub: tuple[HubServer, Scene], capsys: Any
) -> None:
    server, scene = hub
    assert cli.main(["models", "fit", "split", "--clients", scene.stage.endpoint]) == 0
    told = capsys.readouterr()
    assert "split is not here: asking the hub" in told.err
    assert told.out.endswith("first: conductor models pull split\n")
    assert len(server.fetched()) == 4
    assert scene.conductor.list() == []


def test_without_the_hub_it_says_what_to_do(
    hub: tuple[HubServer, Scene], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, scene = hub
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(["models", "fit", "split", "--clients", scene.stage.endpoint]) != 0
    assert "127.0.0.1:9" in capsys.readouterr().err
