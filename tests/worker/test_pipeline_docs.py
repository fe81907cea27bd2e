"""The example of docs/pipeline.md, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from llama_oracle import LlamaOracle

from vram_conductor.worker.pipeline.forward import Capacity

PAGE = (Path(__file__).parents[2] / "docs/pipeline.md").read_text("utf-8")
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\s+```text\n(?P<printed>.*?)```", re.DOTALL)
PROMPT = re.compile(r'\[([\d, ]+)\],  # "(.+)"')


def example() -> re.Match[str]:
    found = EXAMPLE.search(PAGE)
    assert found is not None
    return found


def test_the_example_prints_what_the_page_says(
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / ".cache/vram-conductor/models"
    folder.mkdir(parents=True)
    (folder / smollm2.name).symlink_to(smollm2)
    monkeypatch.setenv("HOME", str(tmp_path))
    exec(compile(example()["code"], "docs/pipeline.md", "exec"), {})
    assert capsys.readouterr().out == example()["printed"]


def test_the_examples_tokens_are_those_of_its_words(smollm2: Path) -> None:
    prompts = PROMPT.findall(example()["code"])
    assert len(prompts) == 2
    with LlamaOracle(smollm2, Capacity(64)) as oracle:
        for tokens, text in prompts:
            assert oracle.tokenize(text).tolist() == [int(token) for token in tokens.split(",")]
