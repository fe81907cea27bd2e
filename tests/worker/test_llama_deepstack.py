"""Text that makes llama.cpp recurse once per character."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

import pytest
from gguf_models import Spec, make_model

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.llama import deepstack
from vram_conductor.worker.llama.deepstack import SHALLOW_CHARS, call_deep

PROGRAM = """
import sys
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
model = LlamaModel(sys.argv[1], "deep", EngineOptions(threads=1))
for char in "aA1 é漢":
    print(len(model.tokenize(char * 120_000, first=True)))
"""


@pytest.mark.parametrize("pre", ["gpt-4o", "deepseek-llm", "tekken", "default"])
def test_a_very_long_word_crashes_nobody(pre: str) -> None:
    path = make_model(Spec(arch="llama", vocab="bpe", pre=pre))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = [30_000, 120_000, 120_000, 120_000, 240_000, 360_000]
    assert [int(line) for line in done.stdout.split()] == counts


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> int:
        raise KeyError(threading.current_thread().name)

    with pytest.raises(KeyError, match="deep"):
        call_deep(fail, SHALLOW_CHARS + 1)
    with pytest.raises(KeyError, match=threading.current_thread().name):
        call_deep(fail, SHALLOW_CHARS)


def test_the_stack_is_only_this_calls() -> None:
    before = threading.stack_size()
    assert call_deep(lambda: 7, 100_000) == 7
    assert threading.stack_size() == before


def test_no_address_space_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepstack, "LEVEL_BYTES", 1 << 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    try:
        with pytest.raises(ResourceExhausted) as caught:
            call_deep(lambda: 7, 1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert caught.value.reason == "no_stack"
    assert threading.stack_size() == 0
