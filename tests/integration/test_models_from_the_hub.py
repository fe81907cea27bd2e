"""From a search on the hub to an answer: the whole product, which runs all the time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import make_parts
from hub_server import HubServer, Repository, use_only
from scene import CHATTY, Scene, model

from vram_conductor.client import cli
from vram_conductor.protocol.errors import NotFound
from vram_conductor.protocol.split_files import combined_sha256
from vram_conductor.protocol.stamp import model_stamp

REPO = "somebody/Tiny-Chat-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    folder = tmp_path / "made"
    folder.mkdir()
    files = {"Tiny-Q8_0.gguf": Path(model(CHATTY)).read_bytes()}
    for path in make_parts(CHATTY, folder):
        files[path.name.replace("llama", "Tiny-F32")] = path.read_bytes()
    assert len(files) > 3
    with HubServer({REPO: Repository(files)}) as server:
        use_only(server, tmp_path, monkeypatch)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_MODELS_DIR", str(tmp_path / "models"))
        yield server


def test_from_a_search_to_an_answer(hub: HubServer, tmp_path: Path, capsys: Any) -> None:
    with Scene(worker=f'models_dir = "{tmp_path}/models"') as scene:
        conductor = scene.conductor
        with pytest.raises(NotFound, match="no model 'whole'"):
            conductor.register("a", "whole", n_ctx=512)
        assert cli.main(["models", "search", REPO, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["models"]
        assert [(each["quantisation"], each["files"] > 1) for each in found] == [
            ("F32", True),
            ("Q8_0", False),
        ]
        for name, each in zip(("split", "whole"), found, strict=True):
            assert cli.main(["models", "add", name, each["source"]]) == 0
            with pytest.raises(NotFound, match="conductor models pull") as caught:
                conductor.register("a", name, n_ctx=512)
            assert caught.value.reason == "model_not_pulled"
            assert cli.main(["models", "pull", name]) == 0
        answers: list[list[int]] = []
        for name in ("split", "whole"):
            agent = conductor.register(name, name, n_ctx=512, temperature=0)
            answers.append(agent.chat("hello", max_tokens=12, return_ids=True).result().ids)
        assert answers[0] == answers[1]
        assert len(answers[0]) > 1
    first = next(path for path in (tmp_path / "models").glob("*-00001-of-*.gguf"))
    assert model_stamp(first) == combined_digest(hub)


def combined_digest(hub: HubServer) -> str:
    """Of the split model, by what the hub has."""
    files = hub.repositories[REPO].files
    return combined_sha256(
        [hashlib.sha256(files[name]).hexdigest() for name in sorted(files) if "-of-" in name]
    )
