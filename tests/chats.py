"""Driving a pool by hand: prefill in micro-batches, greedy tokens, parking."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vram_conductor.protocol.values import Sampling
from vram_conductor.worker.engine import Sampler, Tokens
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.pool import LlamaPool

GREEDY = Sampling(temperature=0)


def ids_of(*values: int) -> Tokens:
    return np.array(values, np.int32)


def some_ids(n: int, seed: int, n_vocab: int = 320) -> Tokens:
    """Random token ids that no test model treats as special."""
    return np.random.default_rng(seed).integers(8, n_vocab, n).astype(np.int32)


def prefill(pool: LlamaPool, slot: int, ids: Tokens, first: int = 0) -> None:
    """Decode ``ids`` from position ``first`` on; logits of the last."""
    for at in range(0, len(ids), pool.batch_tokens):
        part = ids[at : at + pool.batch_tokens]
        pool.decode([(slot, part, first + at, at + len(part) == len(ids))])


def greedy(model: LlamaModel, pool: LlamaPool, slot: int, ids: Tokens, n: int) -> list[int]:
    """``n`` greedy tokens after ``ids`` in an empty slot."""
    chat = Chat(model.sampler(GREEDY, [], 0))
    chat.begin(pool, slot, ids)
    chat.run(pool, slot, n - 1)
    chat.sampler.close()
    return chat.out


@dataclass
class Chat:
    """A greedy conversation; its last token is sampled but not yet decoded."""

    sampler: Sampler
    out: list[int] = field(default_factory=list)
    position: int = 0
    parked: bytes = b""

    def begin(self, pool: LlamaPool, slot: int, ids: Tokens) -> None:
        prefill(pool, slot, ids)
        self.position = len(ids)
        self.out = [pool.sample(slot, self.sampler)]

    def run(self, pool: LlamaPool, slot: int, n: int) -> None:
        """``n`` more tokens."""
        for _ in range(n):
            pool.decode([(slot, ids_of(self.out[-1]), self.position, True)])
            self.position += 1
            self.out.append(pool.sample(slot, self.sampler))

    def park(self, pool: LlamaPool, slot: int) -> None:
        buffer = bytearray(pool.state_bytes(slot))
        assert pool.get_state(slot, memoryview(buffer)) == len(buffer)
        self.parked = bytes(buffer)

    def resume(self, pool: LlamaPool, slot: int) -> None:
        pool.set_state(slot, memoryview(self.parked))
        assert pool.pos_max(slot) == self.position - 1
