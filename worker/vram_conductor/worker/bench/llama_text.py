"""llama.cpp's logits of a text, in a process of their own: what ours are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vram_conductor.worker.bench.decoding import Agreement, compare, greedy, random_tokens
from vram_conductor.worker.bench.llama_steps import Logits, load_bare, stepper
from vram_conductor.worker.bench.reference_text import TEXT
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.pipeline.forward import Batch

GREEDY_TOKENS = 32

COPY_BYTES_MOST = 512 << 20
"""Of a file that a copy in float32, seven times as large, is made of."""

LOGITS, COPY_LOGITS, SAID = "logits.npy", "copy.npy", "said.json"


class Said(msgspec.Struct, frozen=True):
    """What llama.cpp computed on the CPU, beside the logits.

    Attributes:
        tokens: whose logits they are, at every position.
        text: whether they are a real text; without a tokenizer they are drawn.
        prompt, greedy: a shorter prompt, and the most likely tokens after it.
        copy_greedy: those of the copy in float32; [] without one.
        itself: its logits with flash attention beside those without: how far two ways to round
            lead apart. It rounds activations to 8 bits before products with quantised matrices.
    """

    tokens: list[int]
    text: bool
    prompt: list[int]
    greedy: list[int]
    copy_greedy: list[int]
    itself: Agreement


def read_reference(folder: Path) -> tuple[Said, Logits, Logits | None]:
    """What :func:`write_reference` wrote: the logits (positions, n_vocab) of the file, and of its
    copy in float32 if there is one; mapped."""
    said = msgspec.json.decode((folder / SAID).read_bytes(), type=Said)
    copy = folder / COPY_LOGITS
    logits: Logits = np.load(folder / LOGITS, mmap_mode="r")
    return said, logits, np.load(copy, mmap_mode="r") if copy.exists() else None


def write_reference(path: str, threads: int, positions: int, folder: Path) -> Said:
    """Have llama.cpp compute on the CPU, and write the logits into the folder.

    Raises:
        FailedPrecondition: ``no_library``.
        ConductorError: what llama.cpp says to the file.
    """
    bare = load_bare()
    with bare.BareModel(path, EngineOptions(threads=threads), 0) as model:
        text = model.tokenize(TEXT)[:positions]
        tokens = text or random_tokens(positions, model.n_vocab).tolist()
        logits = _logits(bare, model, tokens, flash=False)
        np.save(folder / LOGITS, logits)
        itself = compare(_logits(bare, model, tokens, flash=True), logits)
        prompt = tokens[: max(1, len(tokens) // 4)]
        follows = _greedy(bare, model, prompt)
    in_copy: list[int] = []
    if Path(path).stat().st_size <= COPY_BYTES_MOST:
        with _copy(bare, path, threads, folder) as model:
            np.save(folder / COPY_LOGITS, _logits(bare, model, tokens, flash=False))
            in_copy = _greedy(bare, model, prompt)
    said = Said(tokens, bool(text), prompt, follows, in_copy, itself)
    (folder / SAID).write_bytes(msgspec.json.encode(said))
    return said


@contextlib.contextmanager
def _copy(bare: Any, path: str, threads: int, folder: Path) -> Iterator[Any]:
    """A model with the same weights as float32: then nothing rounds activations."""
    from vram_conductor.worker.llama.requantise import requantise

    copy = folder / "copy.gguf"
    try:
        requantise(path, str(copy), "f32")
        with bare.BareModel(str(copy), EngineOptions(threads=threads), 0) as model:
            yield model
    finally:
        copy.unlink(missing_ok=True)


def _greedy(bare: Any, model: Any, prompt: list[int]) -> list[int]:
    room = bare.Room(len(prompt) + GREEDY_TOKENS, tokens=len(prompt), flash=False)
    with model.open(room) as context:
        return greedy(stepper(context), prompt, GREEDY_TOKENS)


def _logits(bare: Any, model: Any, tokens: list[int], *, flash: bool) -> Logits:
    count = len(tokens)
    with model.open(bare.Room(count, tokens=count, outputs=count, flash=flash)) as context:
        return stepper(context)(Batch.of(tokens, 0, 0, range(count)))
