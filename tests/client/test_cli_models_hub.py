"""``conductor models add``, ``search``, ``pull`` with a hub on the loopback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_parts import eventually
from gguf_models import Spec, make_model
from hub_server import COMMIT, Fault, HubServer, Repository, use_only

from vram_conductor.client import cli

REPO = "somebody/Tiny-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    content = make_model(Spec()).read_bytes()
    half = len(content) // 2
    repositories = {
        REPO: Repository(
            {
                "README.md": b"# Tiny",
                "Tiny-Q4_K_M.gguf": content,
                "Tiny-Q8_0.gguf": content[::-1],
                "f16/Tiny-f16-00001-of-00002.gguf": content[:half],
                "f16/Tiny-f16-00002-of-00002.gguf": content[half:],
            },
            card={"license": "apache-2.0"},
            gguf={"context_length": 4096, "architecture": "llama"},
            downloads=500,
        ),
        "other/Tiny-Llama-GGUF": Repository(
            {"Tiny-Q4_K_M.gguf": content + b"x"},
            card={"license": "other", "license_name": "odd-1.0", "license_link": "https://x"},
            gated=True,
            downloads=9000,
        ),
    }
    with HubServer(repositories) as server:
        use_only(server, tmp_path, monkeypatch)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_MODELS_DIR", str(tmp_path / "models"))
        yield server


def value(capsys: Any, *argv: str) -> Any:
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_add_pull_list_remove(hub: HubServer, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["models", "add", "tiny", f"hf:{REPO}:q4_k_m"]) == 0
    out = capsys.readouterr().out
    assert f"tiny: {REPO}/Tiny-Q4_K_M.gguf" in out
    assert "n_ctx up to 4096, licence apache-2.0" in out
    assert "get it with: conductor models pull tiny" in out
    text = (tmp_path / "vram-conductor" / "models.toml").read_text()
    assert f'revision = "{COMMIT}"' in text, "the commit of now, not a branch that moves"
    assert cli.main(["models", "pull", "tiny"]) == 0
    assert "fetched and verified" in capsys.readouterr().out
    path = tmp_path / "models" / "Tiny-Q4_K_M.gguf"
    assert path.read_bytes() == hub.repositories[REPO].files["Tiny-Q4_K_M.gguf"]
    (tiny,) = [m for m in value(capsys, "models", "list")["models"] if m["name"] == "tiny"]
    assert tiny["state"] == "yes, verified"
    assert tiny["source"]["repo"] == REPO
    assert cli.main(["models", "verify", "tiny"]) == 0
    assert cli.main(["models", "remove", "tiny"]) == 0
    assert list((tmp_path / "models").iterdir()) == []


def test_a_split_model_by_any_of_its_files(hub: HubServer, tmp_path: Path, capsys: Any) -> None:
    source = f"https://huggingface.co/{REPO}/blob/main/f16/Tiny-f16-00002-of-00002.gguf"
    model = value(capsys, "models", "add", "split", source)["model"]
    assert model["file"] == "Tiny-f16-00001-of-00002.gguf"
    assert len(model["source"]["files"]) == 2
    assert cli.main(["models", "pull", "split"]) == 0
    names = [path.name for path in sorted((tmp_path / "models").glob("*.gguf"))]
    assert names == ["Tiny-f16-00001-of-00002.gguf", "Tiny-f16-00002-of-00002.gguf"]
    capsys.readouterr()
    assert cli.main(["models", "verify", "split"]) == 0


def test_a_pull_that_broke_off_shows_in_the_list(hub: HubServer, capsys: Any) -> None:
    value(capsys, "models", "add", "tiny", f"hf:{REPO}:Q4_K_M")
    half = len(hub.repositories[REPO].files["Tiny-Q4_K_M.gguf"]) // 2
    hub.faults["store"] = [Fault(cut_after=half)]
    hub.faults["hub"] = [Fault(), *[Fault(status=503)] * 9]
    assert cli.main(["models", "pull", "tiny"]) == 6
    assert "(hub_unavailable)" in capsys.readouterr().err
    hub.faults["hub"].clear()
    (tiny,) = [m for m in value(capsys, "models", "list")["models"] if m["name"] == "tiny"]
    assert tiny["state"].endswith("% has come")
    assert 1 <= int(tiny["state"].split()[0]) <= 50
    assert cli.main(["models", "pull", "tiny"]) == 0
    assert "going on at" in capsys.readouterr().err


def test_a_pull_that_was_killed_goes_on(hub: HubServer, tmp_path: Path, capsys: Any) -> None:
    value(capsys, "models", "add", "tiny", f"hf:{REPO}:Q4_K_M")
    content = hub.repositories[REPO].files["Tiny-Q4_K_M.gguf"]
    hub.faults["store"] = [Fault(silent_after=5 * len(content) // 8)]
    command = [sys.executable, "-m", "vram_conductor.client.cli", "models", "pull", "tiny"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:
        eventually(lambda: come(tmp_path) >= len(content) // 2, "half of it has come")
        killed.kill()
    kept = come(tmp_path)
    assert cli.main(["models", "pull", "tiny"]) == 0
    assert hub.fetched()[-1] == f"bytes={kept}-"
    assert (tmp_path / "models" / "Tiny-Q4_K_M.gguf").read_bytes() == content


def come(folder: Path) -> int:
    """Bytes of a file that is being pulled."""
    return sum(path.stat().st_size for path in (folder / "models").glob(".*.part"))


def test_several_pulls_at_once_fetch_it_once(hub: HubServer, capsys: Any) -> None:
    value(capsys, "models", "add", "tiny", f"hf:{REPO}:Q4_K_M")
    command = [sys.executable, "-m", "vram_conductor.client.cli", "models", "pull", "tiny"]
    pulls = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    out = "".join(pull.communicate()[0] for pull in pulls)
    assert sorted(re.findall("fetched and verified|here, verified", out)) == [
        "fetched and verified",
        "here, verified",
        "here, verified",
    ]
    assert len(hub.fetched()) == 1


def test_two_repositories_with_a_file_of_one_name(hub: HubServer, capsys: Any) -> None:
    value(capsys, "models", "add", "one", f"hf:{REPO}:Q4_K_M")
    model = value(capsys, "models", "add", "two", "hf:other/Tiny-Llama-GGUF")["model"]
    assert model["file"] == "other--Tiny-Llama-GGUF--Tiny-Q4_K_M.gguf"
    assert (model["licence"], model["licence_url"]) == ("odd-1.0", "https://x")


def test_a_file_with_two_names_stays_until_both_are_gone(
    hub: HubServer, tmp_path: Path, capsys: Any
) -> None:
    for name in ("one", "two"):
        value(capsys, "models", "add", name, f"hf:{REPO}:Q4_K_M")
    assert cli.main(["models", "pull", "one"]) == 0
    assert cli.main(["models", "remove", "one"]) == 0
    assert "no file deleted, two has the same file" in capsys.readouterr().out
    assert cli.main(["models", "verify", "two"]) == 0
    assert cli.main(["models", "remove", "two"]) == 0
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_of_the_users_own_is_not_overwritten(
    hub: HubServer, tmp_path: Path, capsys: Any
) -> None:
    mine = tmp_path / "models" / "Tiny-Q4_K_M.gguf"
    mine.parent.mkdir()
    mine.write_bytes(b"GGUF of mine")
    value(capsys, "models", "add", "tiny", f"hf:{REPO}:Q4_K_M")
    assert cli.main(["models", "pull", "tiny"]) == 0
    assert mine.read_bytes() == b"GGUF of mine"


def test_a_gated_model_is_explained(hub: HubServer, capsys: Any) -> None:
    assert cli.main(["models", "add", "two", "hf:other/Tiny-Llama-GGUF"]) == 0
    assert "other/Tiny-Llama-GGUF is gated: accept its terms" in capsys.readouterr().err
    assert cli.main(["models", "pull", "two"]) != 0
    err = capsys.readouterr().err
    assert "(model_gated)" in err
    assert f"{hub.url()}/other/Tiny-Llama-GGUF" in err
    assert "HF_TOKEN" in err


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f"hf:{REPO}", "ambiguous_model"),
        (f"hf:{REPO}:Q5_0", "no_such_file"),
        (f"hf:{REPO}@v9:Q4_K_M", "no_such_file"),
        ("hf:nobody/nothing", "no_such_repo"),
    ],
)
def test_what_cannot_be_added(
    hub: HubServer, tmp_path: Path, capsys: Any, source: str, reason: str
) -> None:
    assert cli.main(["models", "add", "tiny", source]) != 0
    assert f"({reason})" in capsys.readouterr().err
    assert not (tmp_path / "vram-conductor" / "models.toml").exists()


def test_search_the_catalogue_and_the_hub(hub: HubServer, capsys: Any) -> None:
    value(capsys, "models", "add", "my-tiny", f"hf:{REPO}:Q4_K_M")
    assert cli.main(["models", "search", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"in the catalogue: my-tiny ({REPO}/Tiny-Q4_K_M.gguf")
    rows = [line.split() for line in lines[2:4]]
    assert rows == [
        ["other/Tiny-Llama-GGUF", "9000", "other", "gated"],
        [REPO, "500", "apache-2.0"],
    ]
    assert len(value(capsys, "models", "search", "tiny", "--limit", "1")["hub"]) == 1
    assert cli.main(["models", "search", "zebra"]) == 0
    assert "no repository with GGUF files" in capsys.readouterr().out


def test_search_in_a_repository(hub: HubServer, capsys: Any) -> None:
    assert cli.main(["models", "search", REPO]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{REPO}: 3 models, licence apache-2.0"
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["Tiny-Q4_K_M.gguf", "Q4_K_M"],
        ["Tiny-Q8_0.gguf", "Q8_0"],
        ["f16/Tiny-f16-00001-of-00002.gguf", "F16"],
    ]
    found = value(capsys, "models", "search", REPO)
    assert (found["revision"], found["n_ctx"]) == (COMMIT, 4096)
    assert found["models"][2]["files"] == 2
    assert found["models"][2]["bytes"] == found["models"][0]["bytes"]


def test_without_a_network_the_catalogue_is_still_searched(hub: HubServer, capsys: Any) -> None:
    hub.faults["hub"] = [Fault(status=503)] * 9
    assert cli.main(["models", "search", "smollm2-135"]) == 6
    out, err = capsys.readouterr()
    assert out.startswith("in the catalogue: smollm2-135m (")
    assert "(hub_unavailable)" in err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["qwen2", "instruct"], ["qwen2-0.5b"]),
        (["QWEN2 Instruct"], ["qwen2-0.5b"]),
        (["qwen2-0_5b-instruct-q4_k_m.gguf"], ["qwen2-0.5b"]),
        (["bartowski", "llama"], ["llama3.2-1b"]),
        (["qwen2", "zebra"], []),
    ],
)
def test_every_word_may_be_in_the_name_the_file_or_the_repository(
    hub: HubServer, capsys: Any, words: list[str], found: list[str]
) -> None:
    catalogue = value(capsys, "models", "search", *words)["catalogue"]
    assert [entry["name"] for entry in catalogue] == found


def test_somebody_else_answers(hub: HubServer, capsys: Any) -> None:
    hub.faults["hub"] = [Fault(status=200)]  # a login page, say
    assert cli.main(["models", "search", "tiny"]) != 0
    assert "does not answer as the hub does" in capsys.readouterr().err


@pytest.mark.parametrize("said", [-5, 0, (1 << 50) + 1, 1 << 62])
def test_a_size_that_no_file_has_is_unknown(hub: HubServer, capsys: Any, said: int) -> None:
    hub.repositories[REPO].sizes = dict.fromkeys(
        ["Tiny-Q4_K_M.gguf", "f16/Tiny-f16-00002-of-00002.gguf"], said
    )
    assert cli.main(["models", "search", REPO]) == 0
    rows = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert [rows[0], rows[2]] == [["unknown"], ["unknown"]]
    assert rows[1][1] in ("KiB", "MiB")
    found = value(capsys, "models", "search", REPO)["models"]
    assert [model["bytes"] is None for model in found] == [True, False, True]
    assert cli.main(["models", "add", "tiny", f"hf:{REPO}:Q4_K_M"]) == 4
    assert "no digest or no size" in capsys.readouterr().err


def test_a_file_name_that_is_too_long_is_refused_at_once(
    hub: HubServer, tmp_path: Path, capsys: Any
) -> None:
    files = hub.repositories[REPO].files
    content = files["Tiny-Q4_K_M.gguf"]
    for count, code in ((300, 8), (223, 8), (222, 0)):
        name = f"{'n' * count}-Q4_0.gguf"
        files[name] = content
        assert cli.main(["models", "add", "long", f"hf:{REPO}/{name}"]) == code
        err = capsys.readouterr().err
        assert ("(bad_model_source)" in err) == bool(code)
        assert ("232 are the most" in err) == bool(code)
    assert cli.main(["models", "pull", "long"]) == 0
    assert (tmp_path / "models" / name).read_bytes() == content


def test_a_file_that_is_no_model_is_not_put_in_place(
    hub: HubServer, tmp_path: Path, capsys: Any
) -> None:
    hub.repositories[REPO].files["Page-Q4_K_M.gguf"] = b"<!doctype html>" * 9
    value(capsys, "models", "add", "page", f"hf:{REPO}/Page-Q4_K_M.gguf")
    assert cli.main(["models", "pull", "page"]) == 8
    err = capsys.readouterr().err
    assert f"{REPO}/Page-Q4_K_M.gguf is no GGUF file: it begins with b'<!do' (bad_model)" in err
    assert list((tmp_path / "models").iterdir()) == []
