"""Which weights the cpu backend rewrites when it loads them, found out by loading a few.

It depends on the processor and on how llama.cpp was built. Where the output layer is tied to the
token embeddings and rewritten, both copies stay in memory.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path

from llama_cpp import llama_cpp as ll

from vram_conductor.worker.llama.identity import model_files
from vram_conductor.worker.llama.loading import load_model
from vram_conductor.worker.llama.loglines import parse_buffers
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.samples import Sample, write_sample
from vram_conductor.worker.llama.tensors import Tensor

_PLAIN = frozenset({0, 1, 30})
"""``ggml_type`` f32, f16, bf16: never rewritten."""

_EMBEDDING = "token_embd.weight"


def second_copy_bytes(tensors: Iterable[Tensor]) -> int:
    """What a cpu holds beside the file's tensors: the embeddings again, as the output."""
    found = {tensor.name: tensor for tensor in tensors}
    embedding = found.get(_EMBEDDING)
    if embedding is None or "output.weight" in found or not is_repacked(embedding.kind):
        return 0
    return embedding.bytes


@functools.cache
def is_repacked(kind: int) -> bool:
    """Whether matrices of this ``ggml_type`` are rewritten here."""
    if kind in _PLAIN:
        return False
    with tempfile.TemporaryDirectory(prefix="vram-conductor-") as folder:
        path = Path(folder) / "sample.gguf"
        write_sample(path, Sample(kind=kind))
        model, capture = load_model(model_files(str(path)), EngineOptions(threads=1), dry=False)
    ll.llama_model_free(model)
    return any(
        line.kind == "weights" and line.buffer != "CPU" for line in parse_buffers(capture.texts())
    )
