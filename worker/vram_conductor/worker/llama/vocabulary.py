"""The vocabulary of a loaded model: text to ids and back. Any thread, while the model is open."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.grammar.tokens import TokenTexts
from vram_conductor.worker.llama.binding import unannotated, vocabulary
from vram_conductor.worker.llama.deepstack import call_deep
from vram_conductor.worker.llama.info import metadata
from vram_conductor.worker.llama.schema import schema_constraint
from vram_conductor.worker.llama.specials import Specials

_PIECE_BYTES = 64
_SHORT_BYTES = 512
"""Text up to this length goes to llama.cpp whole, whatever is in it: at most 0.1 s."""

_SPECIAL = (
    ll.LLAMA_TOKEN_ATTR_UNKNOWN | ll.LLAMA_TOKEN_ATTR_CONTROL | ll.LLAMA_TOKEN_ATTR_USER_DEFINED
)
_STRIPS = ll.LLAMA_TOKEN_ATTR_LSTRIP | ll.LLAMA_TOKEN_ATTR_RSTRIP
_LITERAL = ("llama", "gpt2", "gemma4")
"""Tokenizers (``tokenizer.ggml.model``) that look at each text between two special tokens alone
and drop nothing of it."""


@dataclass(frozen=True)
class Facts:
    """What a look at all tokens tells; the same at every load of a file.

    Attributes:
        specials: None where a text cannot be split at them with certainty.
        longest_bytes: upper bound of what one token covers, None where there is none.
    """

    specials: Specials | None
    longest_bytes: int | None


class Vocabulary:
    """See ``engine.Model``, whose part it is.

    Args:
        facts: what is known of models, by id; asked before looking, and told.
    """

    def __init__(self, model: Any, name: str, model_id: str, facts: dict[str, Facts]) -> None:
        self._name, self._model_id, self._known = name, model_id, facts
        # Every call into the library gives the interpreter away, and asks for it again.
        self._ends: dict[int, bool] = {}
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._texts: TokenTexts | None = None
        self._vocab = vocabulary(model)
        kind = ll.llama_vocab_type(self._vocab)
        self._exists = kind != ll.LLAMA_VOCAB_TYPE_NONE
        self._recurses = kind == ll.LLAMA_VOCAB_TYPE_BPE
        self._size = int(ll.llama_vocab_n_tokens(self._vocab))
        self._literal = metadata(model, "tokenizer.ggml.model") in _LITERAL
        adds_bos = self._exists and ll.llama_vocab_get_add_bos(self._vocab)
        self.bos = int(ll.llama_vocab_bos(self._vocab)) if adds_bos else -1
        self.joins = self._find_joins()

    def tokenize(self, text: str, *, first: bool, most: int | None = None) -> Tokens:
        """See ``engine.Model``.

        Raises:
            InvalidArgument: ``bad_text``: lone surrogates.
            FailedPrecondition: ``no_vocabulary``.
        """
        if not self._exists:
            raise FailedPrecondition(
                "no_vocabulary",
                f"{self._name} has no vocabulary: send token ids instead of text",
            )
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("bad_text", f"the text is not valid Unicode: {error}") from None
        specials = self._facts().specials if len(data) > _SHORT_BYTES else None
        if specials is None:
            ids = self._tokenize(data, special=True)
        else:
            ids = self._join(specials, data, most)
        if first and self.bos >= 0 and (len(ids) == 0 or ids[0] != self.bos):
            # Templates may write BOS themselves: never two of them.
            ids = np.concatenate([np.array([self.bos], np.int32), ids])
        return ids

    def _join(self, specials: Specials, data: bytes, most: int | None) -> Tokens:
        parts: list[Tokens] = []
        seen: dict[bytes | int, Tokens] = {}
        count = 0
        for part in specials.split(data):
            ids = seen.get(part)
            if ids is None:
                if isinstance(part, int):
                    ids = np.array([part], np.int32)
                else:
                    ids = self._tokenize(part, special=False)
                seen[part] = ids
            parts.append(ids)
            count += len(ids)
            if most is not None and count > most:
                break
        return np.concatenate(parts)

    def _tokenize(self, data: bytes, *, special: bool) -> Tokens:
        if not self._recurses:
            return self._ask(data, special=special)
        return call_deep(lambda: self._ask(data, special=special), len(data.decode()))

    def _ask(self, data: bytes, *, special: bool) -> Tokens:
        room = len(data) + 16
        while True:
            ids: Tokens = np.empty(room, np.int32)
            pointer = ctypes.cast(ids.ctypes.data, ll.llama_token_p)
            count = int(
                unannotated.llama_tokenize(
                    self._vocab, data, len(data), pointer, room, False, special
                )
            )
            if count >= 0:
                return ids[:count].copy()
            room = -count

    def token_bytes_max(self) -> int | None:
        """See ``engine.Model``."""
        return self._facts().longest_bytes if self._exists else None

    def _facts(self) -> Facts:
        facts = self._known.get(self._model_id)
        if facts is None:
            # Two threads may come here at once; they find the same.
            facts = self._known[self._model_id] = self._look()
        return facts

    def _look(self) -> Facts:
        if not self._literal:
            return Facts(None, None)
        longest, strips = 1, 0
        special: list[tuple[bytes, int]] = []
        for token in range(self._size):
            attributes = int(ll.llama_vocab_get_attr(self._vocab, token))
            text: bytes = ll.llama_vocab_get_text(self._vocab, token)
            # The text stands for as many bytes as it has, or for fewer.
            longest = max(longest, len(text))
            strips |= attributes & _STRIPS
            if attributes & _SPECIAL:
                special.append((text, token))
        if strips:
            # Any number of blanks beside a token belongs to it.
            return Facts(None, None)
        specials = Specials(special)
        return Facts(specials if specials.exact else None, longest)

    def _find_joins(self) -> bool:
        if not self._exists:
            return True
        ids = self.tokenize("a", first=False)
        return b"".join(self.piece(int(token), special=False) for token in ids) == b"a"

    def piece(self, token: int, *, special: bool) -> bytes:
        """See ``engine.Model``."""
        known = self._pieces.get((token, special))
        if known is not None:
            return known
        if not self._exists or not 0 <= token < self._size:
            return b""
        room = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = int(ll.llama_token_to_piece(self._vocab, token, buffer, room, 0, special))
            if count >= 0:
                break
            room = -count
        found = self._pieces[token, special] = buffer.raw[:count]
        return found

    def is_eog(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(ll.llama_vocab_is_eog(self._vocab, token))
        return known

    def constraint(
        self, grammar: str | None, json_schema: dict[str, Any] | None
    ) -> Constraint | None:
        """What holds an answer to a grammar or schema; None where there is neither.

        Raises:
            InvalidArgument: ``bad_grammar``, ``bad_json_schema``.
            OutOfRange: ``grammar_too_complex``. ResourceExhausted: ``grammar_too_ambiguous``.
            Unimplemented: ``unsupported_json_schema``.
            FailedPrecondition: ``no_vocabulary``.
        """
        if grammar is None and json_schema is None:
            return None
        if not self._exists:
            raise FailedPrecondition(
                "no_vocabulary", f"{self._name} has no vocabulary: no text can follow a grammar"
            )
        if self._texts is None:
            # Two threads may come here at once; they find the same.
            self._texts = self._read_texts()
        if grammar is not None:
            return Constraint(grammar, self._texts)
        assert json_schema is not None
        return schema_constraint(json_schema, self._texts)

    def _read_texts(self) -> TokenTexts:
        """A quarter of a second for 262,144 tokens."""
        vocab, ask = self._vocab, ll.llama_token_to_piece
        room = ctypes.create_string_buffer(1 << 12)
        pieces: list[bytes] = []
        for token in range(self._size):
            count = int(ask(vocab, token, room, len(room), 0, False))
            pieces.append(ctypes.string_at(room, count) if count > 0 else b"")
        ends = [t for t in range(self._size) if ll.llama_vocab_is_eog(vocab, t)]
        return TokenTexts(pieces, ends)

    def marks(self) -> tuple[str, str]:
        """Texts of BOS and EOS for templates; empty where there is none."""
        bos, eos = ll.llama_vocab_bos(self._vocab), ll.llama_vocab_eos(self._vocab)
        return self._text(int(bos)), self._text(int(eos))

    def _text(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace")
