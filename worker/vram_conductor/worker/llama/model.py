"""Weights and vocabulary of one GGUF."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import FailedPrecondition, Unavailable
from vram_conductor.protocol.values import Message, PoolShape, Sampling
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.llama.identity import model_files
from vram_conductor.worker.llama.info import chat_template, read_info
from vram_conductor.worker.llama.loading import load_model
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.pool import LlamaPool
from vram_conductor.worker.llama.sampler import LlamaSampler
from vram_conductor.worker.llama.sizes import measured_weights
from vram_conductor.worker.llama.template import ChatTemplate
from vram_conductor.worker.llama.vocabulary import Facts, Vocabulary
from vram_conductor.worker.vmm.library import Vmm
from vram_conductor.worker.vmm.tagged import Tagged


class LlamaModel:
    """See ``engine.Model``. The vocabulary may be used by any thread while the model is open."""

    def __init__(
        self,
        path: str,
        name: str,
        options: EngineOptions,
        facts: dict[str, Facts] | None = None,
        vmm: Vmm | None = None,
    ) -> None:
        """``facts``: what is known of vocabularies, shared between loads. ``vmm``: through which
        weights and pools can sleep."""
        files = model_files(path)
        self._options = options
        self._vmm = vmm
        self._memory = Tagged(vmm)
        self._pools: weakref.WeakSet[LlamaPool] = weakref.WeakSet()
        with self._memory.region():
            self._model, capture = load_model(files, options, dry=False)
        try:
            self.measured_bytes = measured_weights(capture.texts(), options.device_kind)
            self.info = read_info(self._model, files, name)
            if model_files(path) != files:
                raise Unavailable(
                    "load_failed", f"{path} changed while it was loaded; try again", retryable=True
                )
            known = {} if facts is None else facts
            self._vocabulary = Vocabulary(self._model, name, self.info.model, known)
        except BaseException:
            self.close()
            raise
        self.bos = self._vocabulary.bos
        self._template: ChatTemplate | None = None

    def open_pool(self, shape: PoolShape) -> LlamaPool:
        """Create a context of ``shape``."""
        pool = LlamaPool(self._model, self.info, self._options, shape, self._vmm)
        self._pools.add(pool)
        return pool

    def tokenize(self, text: str, *, first: bool, most: int | None = None) -> Tokens:
        """Ids of ``text`` with special tokens parsed. Any thread.

        Raises:
            InvalidArgument: ``bad_text``: lone surrogates.
            FailedPrecondition: ``no_vocabulary``.
        """
        return self._vocabulary.tokenize(text, first=first, most=most)

    def token_bytes_max(self) -> int | None:
        """Upper bound of the bytes that one token covers. Any thread."""
        return self._vocabulary.token_bytes_max()

    def joins(self) -> bool:
        """Whether text may be tokenised in pieces."""
        return self._vocabulary.joins

    def piece(self, token: int, *, special: bool) -> bytes:
        """Bytes of one token; may be part of a character. Any thread."""
        return self._vocabulary.piece(token, special=special)

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""
        return self._vocabulary.is_eog(token)

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
        bos, eos = self._vocabulary.marks()
        return ChatTemplate(source, bos=bos, eos=eos)

    def sampler(
        self,
        sampling: Sampling,
        bias: Sequence[tuple[int, float]],
        seed: int,
        *,
        grammar: str | None = None,
        json_schema: dict[str, Any] | None = None,
    ) -> LlamaSampler:
        """Build a sampler chain. Any thread."""
        constraint = self._vocabulary.constraint(grammar, json_schema)
        context = self.info.n_ctx_train or (1 << 16)
        return LlamaSampler(self.info.n_vocab, context, sampling, bias, seed, constraint)

    @property
    def sleepable(self) -> bool:
        """See ``engine.Model``."""
        return self._memory.sleepable

    @property
    def backup_bytes(self) -> int:
        """See ``engine.Model``."""
        return self._memory.backup_bytes

    def back_up(self) -> None:
        """See ``engine.Model``."""
        self._memory.back_up()

    def drop_backup(self) -> None:
        """See ``engine.Model``."""
        self._memory.drop_backup()

    def sleep(self) -> None:
        """See ``engine.Model``."""
        for pool in list(self._pools):
            pool.synchronize()
        self._memory.sleep(keep=True)

    def wake(self) -> None:
        """See ``engine.Model``."""
        self._memory.wake()

    def close(self) -> None:
        """Free the weights, awake or asleep, and their backup. Idempotent."""
        if self._model:
            ll.llama_model_free(self._model)
            self._model = None
