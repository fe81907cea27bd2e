"""Tiny GGUFs with random weights, one per architecture under test.

They load in llama.cpp within milliseconds and generate varied (meaningless) tokens, the same for
the same seed. ``vocab="none"`` has no tokenizer at all (llama.cpp's ``no_vocab``);
``vocab="bytes"`` has a SentencePiece vocabulary of single bytes, a few words and chat markers;
``vocab="bpe"`` a byte-level BPE vocabulary whose words ``pre`` tells apart.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

Arch = Literal["llama", "qwen2", "gemma3", "mamba", "jamba", "lfm2"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Spec:
    """Dimensions of a tiny model. ``n_swa`` is used by gemma3 only."""

    arch: Arch = "llama"
    seed: int = 1
    n_vocab: int = 320
    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 96
    n_swa: int = 32
    n_ctx_train: int = 4096
    n_ctx_original: int | None = None
    """Training context before rope scaling; models with long and short factors have it."""
    ssm_inner: int | None = None
    """Anything but 2 * n_embd makes llama.cpp abort on jamba."""
    vocab: Literal["none", "bytes", "bpe"] = "none"
    pre: str = "gpt-4o"
    chat_template: str | None = None
    tied: bool = True
    label: str = ""
    """Distinguishes otherwise equal files: another path, another model."""

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def is_attention(self, layer: int) -> bool:
        """Hybrid models alternate: recurrent, attention, recurrent, attention …"""
        if self.arch == "mamba":
            return False
        return self.arch not in ("jamba", "lfm2") or layer % 2 == 1


def make_model(spec: Spec, folder: Path | None = None) -> Path:
    """Write the model (once; the file name is a digest of the spec) and return its path."""
    folder = folder or Path(tempfile.gettempdir()) / "vram-conductor-test-models"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(json.dumps([asdict(spec), _VERSION]).encode()).hexdigest()[:16]
    path = folder / f"{spec.arch}-{key}.gguf"
    if not path.exists():
        part = path.with_suffix(f".part{np.random.default_rng().integers(1 << 60)}")
        _write(spec, part)
        part.rename(path)
    return path


def make_parts(spec: Spec, folder: Path, tensors: int = 12) -> list[Path]:
    """Write the model anew, in parts of at most so many tensors, as ``gguf-split`` would."""
    _write(spec, folder / f"{spec.arch}.gguf", split_max_tensors=tensors)
    return sorted(folder.glob(f"{spec.arch}-*-of-*.gguf"))


_VERSION = 2
_WORDS = ["▁the", "▁a", "▁hello", "▁world", "▁red", "ing", "er", "▁"]
_MARKS = ["<|im_start|>", "<|im_end|>"]


class _Weights:
    """Draws tensors from one generator, so that a seed fixes them all."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.0) -> None:
        """A linear layer; ggml's order is (in, out), numpy's the reverse."""
        data = self._rng.normal(0.0, gain / np.sqrt(n_in), (n_out, n_in))
        self._writer.add_tensor(name, data.astype(np.float32))

    def vector(self, name: str, n: int, centre: float = 1.0, spread: float = 0.1) -> None:
        data = self._rng.normal(centre, spread, n)
        self._writer.add_tensor(name, data.astype(np.float32))


def _write(spec: Spec, path: Path, *, split_max_tensors: int = 0) -> None:
    writer = gguf.GGUFWriter(path, spec.arch, split_max_tensors=split_max_tensors)
    _common(writer, spec)
    _vocabulary(writer, spec)
    weights = _Weights(writer, spec.seed)
    # Gemma multiplies its embeddings by sqrt(n_embd): without this they drown the layers.
    gain = 1.0 if spec.arch == "gemma3" else 6.0
    weights.matrix("token_embd.weight", spec.n_embd, spec.n_vocab, gain=gain)
    final = "token_embd_norm.weight" if spec.arch == "lfm2" else "output_norm.weight"
    weights.vector(final, spec.n_embd)
    if not spec.tied:
        weights.matrix("output.weight", spec.n_embd, spec.n_vocab, gain=6.0)
    for layer in range(spec.n_layer):
        _LAYERS[spec.arch](weights, spec, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _common(writer: gguf.GGUFWriter, spec: Spec) -> None:
    writer.add_context_length(spec.n_ctx_train)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer)
    writer.add_vocab_size(spec.n_vocab)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_feed_forward_length(0 if spec.arch == "mamba" else spec.n_ff)
    if spec.arch in ("mamba", "jamba"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(spec.ssm_inner or 2 * spec.n_embd)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(4)
    if spec.arch == "mamba":
        writer.add_head_count(0)
        return
    heads = [spec.n_head_kv if spec.is_attention(i) else 0 for i in range(spec.n_layer)]
    writer.add_head_count(spec.n_head)
    writer.add_head_count_kv(heads if spec.arch in ("jamba", "lfm2") else spec.n_head_kv)
    if spec.arch == "gemma3":
        writer.add_sliding_window(spec.n_swa)
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.arch == "lfm2":
        writer.add_shortconv_l_cache(3)
    if spec.arch != "jamba":
        writer.add_rope_freq_base(10000.0)
    if spec.n_ctx_original is not None:
        writer.add_rope_scaling_orig_ctx_len(spec.n_ctx_original)


def _vocabulary(writer: gguf.GGUFWriter, spec: Spec) -> None:
    if spec.chat_template is not None:
        writer.add_chat_template(spec.chat_template)
    if spec.vocab == "none":
        writer.add_tokenizer_model("no_vocab")
        return
    if spec.vocab == "bpe":
        _bpe_vocabulary(writer, spec)
        return
    control, byte, normal, unknown = 3, 6, 1, 2
    tokens = ["<unk>", "<s>", "</s>", *_MARKS, *(f"<0x{i:02X}>" for i in range(256)), *_WORDS]
    types = [unknown, control, control, control, control] + [byte] * 256 + [normal] * len(_WORDS)
    while len(tokens) < spec.n_vocab:
        tokens.append(f"▁w{len(tokens)}")
        types.append(normal)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)


def _bpe_vocabulary(writer: gguf.GGUFWriter, spec: Spec) -> None:
    # GPT-2's way to write any byte as a printable character.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    tokens = [chr(byte) for byte in shown] + [chr(256 + at) for at in range(len(hidden))]
    tokens += ["aa", "aaaa", "<|end|>"]
    types = [1] * (len(tokens) - 1) + [3]
    while len(tokens) < spec.n_vocab:
        tokens.append(f"w{len(tokens)}")
        types.append(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(spec.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a a", "aa aa"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)


def _attention(weights: _Weights, spec: Spec, at: str) -> None:
    n_kv = spec.n_head_kv * spec.head_dim
    weights.matrix(f"{at}.attn_q.weight", spec.n_embd, spec.n_embd, gain=3.0)
    weights.matrix(f"{at}.attn_k.weight", spec.n_embd, n_kv, gain=3.0)
    weights.matrix(f"{at}.attn_v.weight", spec.n_embd, n_kv, gain=3.0)
    weights.matrix(f"{at}.attn_output.weight", spec.n_embd, spec.n_embd, gain=3.0)


def _ffn(weights: _Weights, spec: Spec, at: str) -> None:
    weights.vector(f"{at}.ffn_norm.weight", spec.n_embd)
    weights.matrix(f"{at}.ffn_gate.weight", spec.n_embd, spec.n_ff, gain=2.0)
    weights.matrix(f"{at}.ffn_up.weight", spec.n_embd, spec.n_ff, gain=2.0)
    weights.matrix(f"{at}.ffn_down.weight", spec.n_ff, spec.n_embd, gain=2.0)


def _llama(weights: _Weights, spec: Spec, layer: int) -> None:
    at = f"blk.{layer}"
    weights.vector(f"{at}.attn_norm.weight", spec.n_embd)
    _attention(weights, spec, at)
    if spec.arch == "qwen2":
        n_kv = spec.n_head_kv * spec.head_dim
        for name, n in (("q", spec.n_embd), ("k", n_kv), ("v", n_kv)):
            weights.vector(f"{at}.attn_{name}.bias", n, centre=0.0)
    _ffn(weights, spec, at)


def _gemma3(weights: _Weights, spec: Spec, layer: int) -> None:
    at = f"blk.{layer}"
    _llama(weights, spec, layer)
    weights.vector(f"{at}.attn_q_norm.weight", spec.head_dim)
    weights.vector(f"{at}.attn_k_norm.weight", spec.head_dim)
    weights.vector(f"{at}.post_attention_norm.weight", spec.n_embd)
    weights.vector(f"{at}.post_ffw_norm.weight", spec.n_embd)


def _ssm(weights: _Weights, spec: Spec, layer: int) -> None:
    at, n_inner, n_state, rank = f"blk.{layer}", 2 * spec.n_embd, 16, 4
    weights.vector(f"{at}.attn_norm.weight", spec.n_embd)
    weights.matrix(f"{at}.ssm_in.weight", spec.n_embd, 2 * n_inner, gain=2.0)
    weights.matrix(f"{at}.ssm_conv1d.weight", 4, n_inner)
    weights.vector(f"{at}.ssm_conv1d.bias", n_inner, centre=0.0)
    weights.matrix(f"{at}.ssm_x.weight", n_inner, rank + 2 * n_state)
    weights.matrix(f"{at}.ssm_dt.weight", rank, n_inner)
    weights.vector(f"{at}.ssm_dt.bias", n_inner, centre=-1.0)
    # A must be negative, or the state explodes.
    decay = -np.exp(np.random.default_rng(spec.seed + layer).normal(0, 0.5, (n_inner, n_state)))
    weights._writer.add_tensor(f"{at}.ssm_a", decay.astype(np.float32))
    weights.vector(f"{at}.ssm_d", n_inner)
    weights.matrix(f"{at}.ssm_out.weight", n_inner, spec.n_embd, gain=2.0)


def _jamba(weights: _Weights, spec: Spec, layer: int) -> None:
    at = f"blk.{layer}"
    if spec.is_attention(layer):
        _llama(weights, spec, layer)
        return
    _ssm(weights, spec, layer)
    weights.vector(f"{at}.ssm_dt_norm.weight", 4)
    weights.vector(f"{at}.ssm_b_norm.weight", 16)
    weights.vector(f"{at}.ssm_c_norm.weight", 16)
    _ffn(weights, spec, at)


def _lfm2(weights: _Weights, spec: Spec, layer: int) -> None:
    at = f"blk.{layer}"
    if spec.is_attention(layer):
        _llama(weights, spec, layer)
        weights.vector(f"{at}.attn_q_norm.weight", spec.head_dim)
        weights.vector(f"{at}.attn_k_norm.weight", spec.head_dim)
        return
    weights.vector(f"{at}.attn_norm.weight", spec.n_embd)
    weights.matrix(f"{at}.shortconv.conv.weight", 3, spec.n_embd)
    weights.matrix(f"{at}.shortconv.in_proj.weight", spec.n_embd, 3 * spec.n_embd, gain=2.0)
    weights.matrix(f"{at}.shortconv.out_proj.weight", spec.n_embd, spec.n_embd, gain=2.0)
    _ffn(weights, spec, at)


_LAYERS: dict[Arch, Callable[[_Weights, Spec, int], Any]] = {
    "llama": _llama,
    "qwen2": _llama,
    "gemma3": _gemma3,
    "mamba": _ssm,
    "jamba": _jamba,
    "lfm2": _lfm2,
}
