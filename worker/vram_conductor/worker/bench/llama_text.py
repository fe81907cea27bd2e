"""llama.cpp's logits of a text, in a process of their own: what ours are compared with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vram_conductor.worker.bench.decoding import Agreement, compare, greedy, random_tokens
from vram_conductor.worker.bench.llama_steps import Logits, load_bare, stepper
from vram_conductor.worker.bench.phases import Phases
from vram_conductor.worker.bench.reference_text import TEXT
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.pipeline.forward import Batch

GREEDY_TOKENS = 32

POSITIONS, POSITIONS_LARGE = 256, 64
LARGE_BYTES = 1 << 30
"""Of files from this size on fewer positions are compared: llama.cpp computes them on the CPU."""

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
        itself: its logits and greedy tokens with flash attention beside those without: how far two
            ways to round lead apart. It rounds activations to 8 bits before products with
            quantised matrices.
        copy_itself: the logits of the copy likewise; None without one.
        phases: seconds of each part.
    """

    tokens: list[int]
    text: bool
    prompt: list[int]
    greedy: list[int]
    copy_greedy: list[int]
    itself: Agreement
    copy_itself: Agreement | None
    phases: dict[str, float]

    def first(self, positions: int, greedy: int) -> Said:
        """As if no more had been asked of it; how it agrees with itself stays that of all."""
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[:positions],
            greedy=self.greedy[:greedy],
            copy_greedy=self.copy_greedy[:greedy],
        )


def read_reference(folder: Path) -> tuple[Said, Logits, Logits | None]:
    """What :func:`write_reference` wrote: the logits (positions, n_vocab) of the file, and of its
    copy in float32 if there is one; mapped."""
    said = msgspec.json.decode((folder / SAID).read_bytes(), type=Said)
    copy = folder / COPY_LOGITS
    logits: Logits = np.load(folder / LOGITS, mmap_mode="r")
    return said, logits, np.load(copy, mmap_mode="r") if copy.exists() else None


def write_reference(
    path: str, threads: int, positions: int, folder: Path, seconds: float = 300.0
) -> Said:
    """Have llama.cpp compute on the CPU, and write the logits into the folder.

    Args:
        positions: of the text; 0: as many as is right for a file of this size.
        seconds: after which the copy in float32 is not begun.

    Raises:
        FailedPrecondition: ``no_library``.
        ConductorError: what llama.cpp says to the file.
    """
    until, bare, phases = time.monotonic() + seconds, load_bare(), Phases()
    n_bytes = Path(path).stat().st_size
    with contextlib.ExitStack() as stack:
        with phases.phase("load"):
            model = stack.enter_context(bare.BareModel(path, EngineOptions(threads=threads), 0))
        count = positions or (POSITIONS if n_bytes < LARGE_BYTES else POSITIONS_LARGE)
        text = model.tokenize(TEXT)[:count]
        tokens = text or random_tokens(count, model.n_vocab).tolist()
        prompt = tokens[: max(1, len(tokens) // 4)]
        with phases.phase("logits"):
            logits = _logits(bare, model, tokens, flash=False)
            np.save(folder / LOGITS, logits)
        with phases.phase("greedy"):
            follows = _greedy(bare, model, prompt, flash=False)
        with phases.phase("itself"):
            other = _greedy(bare, model, prompt, flash=True)
            itself = compare(_logits(bare, model, tokens, flash=True), logits, other, follows)
    in_copy: list[int] = []
    copy_itself: Agreement | None = None
    if n_bytes <= COPY_BYTES_MOST and time.monotonic() < until:
        with phases.phase("copy"), _copy(bare, path, threads, folder) as model:
            logits = _logits(bare, model, tokens, flash=False)
            np.save(folder / COPY_LOGITS, logits)
            copy_itself = compare(_logits(bare, model, tokens, flash=True), logits)
            in_copy = _greedy(bare, model, prompt, flash=False)
    said = Said(tokens, bool(text), prompt, follows, in_copy, itself, copy_itself, phases.seconds)
    (folder / SAID).write_bytes(msgspec.json.encode(said))
    return said


@contextlib.contextmanager
def _copy(bare: Any, path: str, threads: int, folder: Path) -> Generator[Any]:
    """A model with the same weights as float32: then nothing rounds activations."""
    from vram_conductor.worker.llama.requantise import requantise

    copy = folder / "copy.gguf"
    try:
        requantise(path, str(copy), "f32")
        with bare.BareModel(str(copy), EngineOptions(threads=threads), 0) as model:
            yield model
    finally:
        copy.unlink(missing_ok=True)


def _greedy(bare: Any, model: Any, prompt: list[int], *, flash: bool) -> list[int]:
    room = bare.Room(len(prompt) + GREEDY_TOKENS, tokens=len(prompt), flash=flash)
    with model.open(room) as context:
        return greedy(stepper(context), prompt, GREEDY_TOKENS)


def _logits(bare: Any, model: Any, tokens: list[int], *, flash: bool) -> Logits:
    count = len(tokens)
    with model.open(bare.Room(count, tokens=count, outputs=count, flash=flash)) as context:
        return stepper(context)(Batch.of(tokens, 0, 0, range(count)))
