"""Sampler chains: built once per job, run in C."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as ll
from numpy.typing import NDArray

from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.protocol.values import SAMPLING_DEFAULTS, Sampling
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.llama.binding import unannotated

PENALTY_TOKENS_MAX = 1 << 20
"""Longest memory of the penalties: llama.cpp allocates it at once."""

_FLOAT_MAX = 1e30
_RANGES: dict[str, tuple[float, float, bool]] = {
    # name: lowest, highest, lowest itself allowed
    "temperature": (0.0, _FLOAT_MAX, True),
    "top_k": (0, (1 << 31) - 1, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repeat_penalty": (0.0, _FLOAT_MAX, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "penalty_last_n": (-1, (1 << 31) - 1, True),
}


def check_sampling(sampling: Sampling) -> Sampling:
    """``sampling`` with every default filled in.

    Raises:
        InvalidArgument: ``bad_sampling``: out of range or not finite; llama.cpp would abort the
            process or sample garbage.
    """
    full = sampling.over(SAMPLING_DEFAULTS)
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(full, name)
        if math.isfinite(value) and (low < value or (closed and low == value)) and value <= high:
            continue
        raise InvalidArgument(
            "bad_sampling",
            f"{name}={value} is out of range: it must be {'>=' if closed else '>'} {low:g}"
            + (f" and <= {high:g}" if high < 1e9 else " and finite"),
            parameter=name,
        )
    return full


def check_bias(bias: Sequence[tuple[int, float]], n_vocab: int) -> None:
    """Raises InvalidArgument ``bad_logit_bias``: no such token, or not a finite number."""
    for token, value in bias:
        if not 0 <= token < n_vocab:
            raise InvalidArgument(
                "bad_logit_bias",
                f"logit_bias names token {token}; this model has tokens 0 to {n_vocab - 1}",
                parameter="logit_bias",
                n_vocab=n_vocab,
            )
        if not (math.isfinite(value) and abs(value) <= _FLOAT_MAX):
            raise InvalidArgument(
                "bad_logit_bias",
                f"logit_bias {value} must be a finite number; -100 bans a token",
                parameter="logit_bias",
            )


def largest(logits: Any, n_vocab: int) -> int:
    """The first token with the largest of ``n_vocab`` logits (a pointer), as llama.cpp's greedy
    sampler takes it; one that is not a number, if there is any. llama.cpp makes a list of the
    whole vocabulary first: with a large one that takes a fifth of what a small model computes."""
    row = (ctypes.c_float * n_vocab).from_address(ctypes.addressof(logits.contents))
    return int(np.frombuffer(memoryview(row), np.float32).argmax())


_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""``llama_token_data`` (llama.h)."""

_LOOK = 256
"""So many of the best tokens are looked at first. Inside a string, with a count of its characters,
that takes a millisecond; all tokens of a vocabulary take 25."""


def _dead_end() -> FailedPrecondition:
    return FailedPrecondition(
        "grammar_dead_end",
        "no token of this model can follow by the grammar; what was said so far stays. Allow more, "
        "or characters that the model knows",
    )


class LlamaSampler:
    """(grammar →) penalties → logit bias → top-k → top-p → min-p → temperature → distribution, or
    greedy.

    ``n_vocab`` is the vocabulary's size, ``n_context`` what ``penalty_last_n = -1`` stands for.
    """

    def __init__(
        self,
        n_vocab: int,
        n_context: int,
        sampling: Sampling,
        bias: Sequence[tuple[int, float]],
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        full = check_sampling(sampling)
        check_bias(bias, n_vocab)
        self._chain: Any = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
        self._penalties = self._add_penalties(n_vocab, n_context, full)
        if bias:
            array = (ll.llama_logit_bias * len(bias))(
                *(ll.llama_logit_bias(token, value) for token, value in bias)
            )
            self._add(ll.llama_sampler_init_logit_bias(n_vocab, len(bias), array))
        self._n_vocab = n_vocab
        as_they_are = not self._penalties and not bias
        # It takes the token with the largest logit and remembers nothing.
        self._plain = full.temperature == 0 and as_they_are
        self._keeps = 0 if not as_they_are else 1 if self._plain else full.top_k or 0
        if full.temperature == 0:
            self._add(ll.llama_sampler_init_greedy())
            return
        if full.top_k:
            self._add(ll.llama_sampler_init_top_k(full.top_k))
        if full.top_p is not None and full.top_p < 1:
            self._add(ll.llama_sampler_init_top_p(full.top_p, 1))
        if full.min_p:
            self._add(ll.llama_sampler_init_min_p(full.min_p, 1))
        self._add(ll.llama_sampler_init_temp(full.temperature or 0.0))
        self._add(ll.llama_sampler_init_dist(seed & 0xFFFFFFFF))

    def _add_penalties(self, n_vocab: int, n_context: int, full: Sampling) -> bool:
        last_n = full.penalty_last_n or 0
        if last_n < 0:
            last_n = n_context
        last_n = min(last_n, PENALTY_TOKENS_MAX)
        neutral = (full.repeat_penalty, full.presence_penalty, full.frequency_penalty) == (1, 0, 0)
        if last_n == 0 or neutral:
            return False
        self._add(
            ll.llama_sampler_init_penalties(
                n_vocab,
                last_n,
                full.repeat_penalty or 1.0,
                full.frequency_penalty or 0.0,
                full.presence_penalty or 0.0,
            )
        )
        return True

    def _add(self, sampler: Any) -> None:
        ll.llama_sampler_chain_add(self._chain, sampler)

    @property
    def finished(self) -> bool:
        """See ``engine.Sampler``."""
        return self._constraint is not None and self._constraint.finished

    def pick(self, context: Any, index: int, logits: Any) -> int:
        """The next token after output ``index`` of ``context``, whose ``logits`` are these.

        Raises:
            FailedPrecondition: ``grammar_dead_end``.
            ResourceExhausted: ``grammar_too_ambiguous``.
        """
        if self._constraint is not None:
            return self._pick_within(self._constraint, logits)
        if self._plain:
            return largest(logits, self._n_vocab)
        return int(ll.llama_sampler_sample(self._chain, context, index))

    def _pick_within(self, constraint: Constraint, logits: Any) -> int:
        """The chain sees nothing but what the grammar allows."""
        row = np.ctypeslib.as_array(logits, (self._n_vocab,))
        # Greedily, and mostly: the best of all is allowed, and then it is the best of those.
        best = int(row.argmax()) if self._plain else -1
        if best >= 0 and not math.isfinite(row[best]):
            return best  # the caller says what that means
        if best < 0 or not constraint.allows(best):
            ids = self._allowed(constraint, row)
            if not len(ids):
                raise _dead_end()
            best = int(ids[row[ids].argmax()]) if self._plain else self._choose(ids, row)
        constraint.accept(best)
        return best

    def _allowed(self, constraint: Constraint, row: NDArray[np.float32]) -> Tokens:
        """What the chain has to choose from: all that is allowed, or as many of the best of that
        as its first sampler keeps."""
        if 0 < self._keeps < _LOOK < self._n_vocab and not constraint.known:
            best = np.sort(np.argpartition(row, -_LOOK)[-_LOOK:]).astype(np.int32)
            found = constraint.among(best)
            if len(found) >= self._keeps:
                return found
        return constraint.allowed()

    def _choose(self, ids: Tokens, row: NDArray[np.float32]) -> int:
        candidates = np.zeros(len(ids), _CANDIDATE)
        candidates["id"], candidates["logit"] = ids, row[ids]
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(ll.llama_token_data))
        array = ll.llama_token_data_array(data, len(ids), -1, False)
        unannotated.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        ll.llama_sampler_accept(self._chain, token)
        return token

    def accept(self, token: int) -> None:
        """Tell the penalties about a token that was not sampled here."""
        # Only the penalties remember anything: without them a long prompt costs nothing.
        if self._penalties:
            ll.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._chain:
            ll.llama_sampler_free(self._chain)
            self._chain = None
