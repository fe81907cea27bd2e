"""Weights and vocabulary of one GGUF."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from vram_conductor.protocol.values import Message, PoolShape, Sampling
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.llama.identity import model_id, stat_model
from vram_conductor.worker.llama.info import chat_template, read_info
from vram_conductor.worker.llama.loading import load_model
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.pool import LlamaPool
from vram_conductor.worker.llama.sampler import LlamaSampler
from vram_conductor.worker.llama.sizes import measured_weights
from vram_conductor.worker.llama.template import ChatTemplate

_PIECE_BYTES = 64


class LlamaModel:
    """See ``engine.Model``. The vocabulary may be used by any thread while the model is open."""

    def __init__(self, path: str, name: str, options: EngineOptions) -> None:
        stat = stat_model(path)
        self._options = options
        self._model, capture = load_model(path, options, dry=False)
        self.measured_bytes = measured_weights(capture.texts(), options.device_kind)
        self.info = read_info(self._model, path, name, stat)
        if model_id(stat_model(path)) != self.info.model:
            self.close()
            raise Unavailable(
                "load_failed", f"{path} changed while it was loaded; try again", retryable=True
            )
        self._vocab = ll.llama_model_get_vocab(self._model)
        self._has_vocab = ll.llama_vocab_type(self._vocab) != ll.LLAMA_VOCAB_TYPE_NONE
        adds_bos = self._has_vocab and ll.llama_vocab_get_add_bos(self._vocab)
        self.bos = int(ll.llama_vocab_bos(self._vocab)) if adds_bos else -1
        self._joins = self._find_joins()
        self._template: ChatTemplate | None = None

    def open_pool(self, shape: PoolShape) -> LlamaPool:
        """Create a context of ``shape``."""
        return LlamaPool(self._model, self.info, self._options, shape)

    def tokenize(self, text: str, *, first: bool) -> Tokens:
        """Ids of ``text`` with special tokens parsed. Any thread.

        llama.cpp looks for every special token in turn, so unlucky text is slow: with the 6,400
        of Gemma 3 a ``<`` costs 0.1 ms, and blank lines cost the square of their number. Streams
        do not wait for it if it is called on another thread than theirs.

        Raises:
            InvalidArgument: ``bad_text``: lone surrogates.
            FailedPrecondition: ``no_vocabulary``.
        """
        self._need_vocab()
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("bad_text", f"the text is not valid Unicode: {error}") from None
        room = len(data) + 16
        while True:
            ids: Tokens = np.empty(room, np.int32)
            pointer = ctypes.cast(ids.ctypes.data, ll.llama_token_p)
            count = int(ll.llama_tokenize(self._vocab, data, len(data), pointer, room, False, True))
            if count >= 0:
                break
            room = -count
        ids = ids[:count].copy()
        if first and self.bos >= 0 and (count == 0 or ids[0] != self.bos):
            # Templates may write BOS themselves: never two of them.
            ids = np.concatenate([np.array([self.bos], np.int32), ids])
        return ids

    def joins(self) -> bool:
        """Whether text may be tokenised in pieces."""
        return self._joins

    def _find_joins(self) -> bool:
        if not self._has_vocab:
            return True
        ids = self.tokenize("a", first=False)
        return b"".join(self.piece(int(token), special=False) for token in ids) == b"a"

    def piece(self, token: int, *, special: bool) -> bytes:
        """Bytes of one token; may be part of a character. Any thread."""
        if not self._has_vocab or not 0 <= token < self.info.n_vocab:
            return b""
        count = -_PIECE_BYTES
        while count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = int(
                ll.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
            )
        return buffer.raw[:count]

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""
        return bool(ll.llama_vocab_is_eog(self._vocab, token))

    def _need_vocab(self) -> None:
        if not self._has_vocab:
            raise FailedPrecondition(
                "no_vocabulary",
                f"{self.info.name} has no vocabulary: send token ids instead of text",
            )

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Apply the file's chat template. Any thread.

        Raises:
            FailedPrecondition: ``no_chat_template``, ``bad_chat_template``.
            InvalidArgument: ``bad_messages``, ``template_limit``.
        """
        if self._template is None:
            self._template = self._read_template()
        return self._template.render(messages, generate=generate)

    def _read_template(self) -> ChatTemplate:
        source = chat_template(self._model)
        if source is None:
            raise FailedPrecondition(
                "no_chat_template",
                f"{self.info.name} brings no chat template: send a prompt instead of messages",
                model=self.info.model,
            )
        bos, eos = (
            self._text(int(token))
            for token in (ll.llama_vocab_bos(self._vocab), ll.llama_vocab_eos(self._vocab))
        )
        return ChatTemplate(source, bos=bos, eos=eos)

    def _text(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace")

    def sampler(
        self, sampling: Sampling, bias: Sequence[tuple[int, float]], seed: int
    ) -> LlamaSampler:
        """Build a sampler chain."""
        context = self.info.n_ctx_train or (1 << 16)
        return LlamaSampler(self.info.n_vocab, context, sampling, bias, seed)

    def close(self) -> None:
        """Free the weights. Idempotent."""
        if self._model:
            ll.llama_model_free(self._model)
            self._model = None
