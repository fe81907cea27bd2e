"""What is not offered is refused, never ignored: adapters (case C10), context shift (case E3)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf_models import Spec
from scene import Scene, model, refusal, some_tokens

from vram_conductor.protocol.errors import Code

N_CTX = 256
WORDS = some_tokens(30, 8)


def write_adapter(path: Path) -> None:
    """A LoRA of rank 2 for one tensor, as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    for part in ("lora_a", "lora_b"):
        writer.add_tensor(f"blk.0.attn_q.weight.{part}", np.ones((64, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_adapter_is_no_model(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "lora.gguf"
    write_adapter(path)
    with scene.undisturbed():
        error = refusal(lambda: scene.conductor.register("tuned", str(path), n_ctx=N_CTX))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "bad_model")


def test_a_full_context_ends_the_answer_and_is_never_shifted(scene: Scene) -> None:
    scene.conductor.register("full", model(Spec(vocab="bytes", seed=160)), n_ctx=N_CTX)
    with scene.undisturbed():
        error = refusal(lambda: scene.run("full", WORDS, overflow="shift"))
        assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "unsupported_overflow")
        assert not scene.agent("full").conversations, "nothing has begun"
        whole = scene.run("full", WORDS, max_tokens=None)
    usage = whole.usage
    assert usage.stop_reason == "length"
    # All of it is there, from the first token on; the last one that is generated needs no cell.
    assert usage.prompt_tokens + usage.generated_tokens in (N_CTX, N_CTX + 1)
    record = scene.conductor.history("full", ids=True).ids
    assert record == [*WORDS, *whole.ids]
    more = refusal(lambda: scene.run("full", WORDS))
    assert more.code == Code.OUT_OF_RANGE
    assert scene.conductor.history("full", ids=True).ids == record
