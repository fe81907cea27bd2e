"""An engine without arithmetic, for tests of the worker's core.

It may be used by several threads, as the core's lanes do, and notices two in one pool. Its next
token is a hash of what is in the slot's cache, so an answer is right only if the cache
holds exactly the right tokens at the right positions. It counts bytes and time, and it refuses
what llama.cpp would abort on.
"""

from __future__ import annotations

import functools
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import xxhash

from vram_conductor.protocol.errors import (
    ConductorError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
)
from vram_conductor.protocol.values import Message, ModelInfo, PoolShape, Sampling
from vram_conductor.worker.engine import Estimator, Sampler, Tokens

BOS, EOG, USER, ASSISTANT = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "<|end|>": EOG, "<|user|>": USER, "<|assistant|>": ASSISTANT}
NAMES = {token: text.encode() for text, token in SPECIAL.items()}
PAIRS = [a + b for a in "abcd" for b in "abcd"]
FIRST_PAIR = 260
N_VOCAB = FIRST_PAIR + len(PAIRS)
WINDOW, SLACK = 8, 4
"""The sliding window attends to so many tokens, and keeps so many more."""

_OUTPUT = [ord(char) for char in "abcd e"] + [0xC3, 0xA9] + list(range(FIRST_PAIR, N_VOCAB))
_CONTROL = re.compile("|".join(re.escape(text) for text in SPECIAL))


@dataclass
class FakeDevice:
    """Memory and time.

    Attributes:
        limit_bytes: more must never be allocated.
        capacity_bytes: more cannot be; ``foreign_bytes`` of it are taken by others.
        peak_bytes: the most that was ever allocated.
        pinned_bytes: host memory that backups take.
        violations: what was allocated beyond the limit.
    """

    limit_bytes: int = 1 << 60
    capacity_bytes: int = 1 << 60
    foreign_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    pinned_bytes: int = 0
    violations: list[str] = field(default_factory=list)
    now_ns: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def clock(self) -> int:
        return self.now_ns

    def spend(self, ms: float) -> None:
        with self._lock:
            self.now_ns += int(ms * 1e6)

    def allocate(self, size_bytes: int, what: str) -> None:
        with self._lock:
            self.allocated_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            if self.allocated_bytes > self.limit_bytes:
                self.violations.append(f"{what}: {self.allocated_bytes} > {self.limit_bytes}")

    def check_free(
        self, size_bytes: int, error: Callable[..., ConductorError], reason: str
    ) -> None:
        """Raises ``error`` where the device has not so much left."""
        free = self.capacity_bytes - self.foreign_bytes - self.allocated_bytes
        if size_bytes > free:
            numbers = {"need_bytes": size_bytes, "free_bytes": free}
            raise error(reason, f"{size_bytes} > {free}", retryable=True, **numbers)

    def release(self, size_bytes: int) -> None:
        with self._lock:
            assert self.allocated_bytes >= size_bytes
            self.allocated_bytes -= size_bytes


@dataclass
class ModelSpec:
    """A fake GGUF. ``surprise_bytes``: allocated beyond the estimate, per pool; ``scratch_bytes``:
    taken by the first computation in a pool, and kept until that is closed."""

    model: str
    weights_bytes: int = 100
    rollback: Literal["any", "window", "none"] = "any"
    template: bool = True
    joins: bool = True
    surprise_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def path(self) -> str:
        return f"/models/{self.model}.gguf"

    def pool_bytes(self, shape: PoolShape) -> int:
        """Exact estimate of a pool."""
        return shape.cells + 10 * shape.slots


class FakeSampler:
    """Greedy, or pseudo-random by seed; with a repeat penalty it depends on what it accepted."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.greedy = not sampling.temperature
        self.penalty = (sampling.repeat_penalty or 1.0) != 1.0
        self.last_n = sampling.penalty_last_n or 0
        self.seed = seed
        self.drawn = 0
        self.accepted: list[int] = []
        self.closed = False
        self.finished = False

    def accept(self, token: int) -> None:
        assert not self.closed
        self.accepted.append(token)

    def close(self) -> None:
        self.closed = True

    def choose(self, digest: int) -> int:
        """The next token for a cache with this digest."""
        assert not self.closed
        salt = [digest]
        if not self.greedy:
            salt += [self.seed, self.drawn]
        if self.penalty:
            salt += self.accepted[-self.last_n :]
        self.drawn += 1
        value = xxhash.xxh3_64_intdigest(repr(salt).encode())
        token = EOG if value % 23 == 0 else _OUTPUT[value // 23 % len(_OUTPUT)]
        self.accept(token)
        return token


@dataclass
class Cache:
    """One sequence's cache: what it holds depends on the kind of attention."""

    kind: Literal["any", "window", "none"]
    count: int = 0
    tokens: list[int] = field(default_factory=list)
    chain: int = 0

    def add(self, token: int) -> None:
        self.count += 1
        if self.kind == "none":
            self.chain = xxhash.xxh3_64_intdigest(struct.pack("<Qi", self.chain, token))
            return
        self.tokens.append(token)
        if self.kind == "window" and len(self.tokens) > WINDOW + SLACK:
            del self.tokens[0]

    @property
    def pos_min(self) -> int:
        if self.count == 0:
            return -1
        return self.count - len(self.tokens) if self.kind != "none" else self.count - 1

    def digest(self) -> int:
        if self.kind == "none":
            return self.chain
        seen = self.tokens[-WINDOW:] if self.kind == "window" else self.tokens
        first = self.count - len(seen)
        return xxhash.xxh3_64_intdigest(np.array([first, *seen], np.int32).tobytes())

    def cut(self, keep: int) -> bool:
        if keep >= self.count:
            return True
        if keep <= 0:
            self.count, self.tokens, self.chain = 0, [], 0
            return True
        if self.kind == "none":
            return False
        if self.kind == "window" and self.pos_min > max(0, keep - WINDOW):
            return False
        del self.tokens[len(self.tokens) - (self.count - keep) :]
        self.count = keep
        return True

    def blob(self) -> bytes:
        head = struct.pack("<iiQ", self.count, len(self.tokens), self.chain)
        return head + np.array(self.tokens, np.int32).tobytes()

    def load(self, blob: bytes) -> None:
        self.count, length, self.chain = struct.unpack_from("<iiQ", blob)
        if len(blob) != 16 + 4 * length:
            raise Internal("state_failed", "the state is shorter than it says")
        self.tokens = np.frombuffer(blob, np.int32, offset=16).tolist()


@dataclass
class Faults:
    """What goes wrong next; each is asked once per call and may raise."""

    load: Callable[[str], None] = lambda path: None
    open: Callable[[PoolShape], None] = lambda shape: None
    decode: Callable[[Sequence[tuple[int, Tokens, int, bool]]], None] = lambda batch: None
    sample: Callable[[int], None] = lambda slot: None
    get: Callable[[], None] = lambda: None
    set: Callable[[], None] = lambda: None
    back_up: Callable[[], None] = lambda: None
    sleep: Callable[[], None] = lambda: None
    wake: Callable[[], None] = lambda: None
    warm_up: Callable[[], None] = lambda: None


P = ParamSpec("P")
T = TypeVar("T")


def alone(method: Callable[Concatenate[FakePool, P], T]) -> Callable[Concatenate[FakePool, P], T]:
    """One thread at a time: another that comes meanwhile is a bug."""

    @functools.wraps(method)
    def guarded(pool: FakePool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not pool.user.acquire(blocking=False):
            pool.engine.device.violations.append(f"{method.__name__} beside another thread")
            raise AssertionError(f"two threads in a pool of {pool.model.spec.model}")
        try:
            return method(pool, *args, **kwargs)
        finally:
            pool.user.release()

    return guarded


class FakePool:
    def __init__(self, model: FakeModel, shape: PoolShape) -> None:
        self.user = threading.RLock()
        self.shape = shape
        self.model = model
        self.engine = model.engine
        self.measured_bytes = model.spec.pool_bytes(shape) + model.spec.surprise_bytes
        self.caches = [Cache(model.spec.rollback) for _ in range(shape.slots)]
        self.logits: dict[int, int] = {}
        self.open, self.asleep, self.scratch = True, False, False
        self.sleepable = self.engine.sleepable
        device = self.engine.device
        device.check_free(self.measured_bytes, ResourceExhausted, "pool_failed")
        device.allocate(self.measured_bytes, f"pool of {model.spec.model}")
        device.spend(20)

    @alone
    def warm_up(self) -> None:
        assert self.computes
        assert not any(cache.count for cache in self.caches)
        self.engine.faults.warm_up()
        self.engine.device.spend(5)
        self.take_scratch()

    @alone
    def sleep(self) -> None:
        assert self.open
        assert self.sleepable
        assert not self.asleep
        self.engine.faults.sleep()
        self.asleep = True
        self.logits = {}
        for cache in self.caches:
            cache.cut(0)
        self.engine.device.release(self.measured_bytes)
        self.engine.device.spend(0.5)

    @alone
    def wake(self) -> None:
        assert self.open
        assert self.asleep
        self.engine.faults.wake()
        device = self.engine.device
        device.check_free(self.measured_bytes, ResourceExhausted, "wake_failed")
        device.allocate(self.measured_bytes, f"wake of a pool of {self.model.spec.model}")
        device.spend(1)
        self.asleep = False

    def take_scratch(self) -> None:
        spec = self.model.spec
        if spec.scratch_bytes and not self.scratch:
            self.scratch = True
            self.engine.device.allocate(spec.scratch_bytes, f"scratch of {spec.model}")

    @property
    def computes(self) -> bool:
        return self.open and not self.asleep and self.model.loaded and not self.model.asleep

    @alone
    def decode(self, batch: Sequence[tuple[int, Tokens, int, bool]]) -> None:
        assert self.computes
        self.take_scratch()
        total = sum(len(ids) for _, ids, _, _ in batch)
        assert 0 < total <= self.engine.batch_tokens
        assert sum(want for *_, want in batch) <= self.shape.slots
        assert len({slot for slot, *_ in batch}) == len(batch)
        if total + sum(cache.count for cache in self.caches) > self.shape.cells:
            raise ResourceExhausted("kv_full", "no cells")
        try:
            self.engine.faults.decode(batch)
        except ConductorError as error:
            if error.reason != "kv_full":
                # As with llama.cpp, a part of the batch may be in the cache.
                for slot, *_ in batch:
                    self.caches[slot].add(7)
            raise
        self.engine.device.spend(2 + 0.5 * total)
        self.engine.decoded_tokens += total
        self.logits = {}
        for slot, ids, first, want in batch:
            cache = self.caches[slot]
            assert first == cache.count, f"position {first} after {cache.count} tokens"
            assert len(ids)
            for token in ids:
                assert 0 <= token < N_VOCAB
                cache.add(int(token))
            if want:
                self.logits[slot] = cache.digest()

    @alone
    def sample(self, slot: int, sampler: Sampler) -> int:
        assert self.computes
        assert isinstance(sampler, FakeSampler)
        self.engine.faults.sample(slot)
        return sampler.choose(self.logits.pop(slot))

    @alone
    def pos_min(self, slot: int) -> int:
        return self.caches[slot].pos_min

    @alone
    def pos_max(self, slot: int) -> int:
        return self.caches[slot].count - 1

    @alone
    def truncate(self, slot: int, keep: int) -> bool:
        assert self.open
        assert not self.asleep or keep == 0
        return self.caches[slot].cut(keep)

    @alone
    def state_bytes(self, slot: int) -> int:
        cache = self.caches[slot]
        return len(cache.blob()) if cache.count else 0

    @alone
    def get_state(self, slot: int, into: memoryview) -> int:
        assert self.open
        assert not self.asleep
        self.engine.faults.get()
        blob = self.caches[slot].blob()
        into[: len(blob)] = blob
        self.engine.device.spend(2)
        return len(blob)

    @alone
    def set_state(self, slot: int, blob: memoryview) -> None:
        assert self.open
        assert not self.asleep
        cache = self.caches[slot]
        cache.cut(0)
        # Garbage first: whoever does not empty the slot after a failure will see it.
        cache.add(7)
        self.engine.faults.set()
        cache.load(bytes(blob))
        self.engine.device.spend(2)

    @alone
    def close(self) -> None:
        assert self.open
        self.open = False
        if not self.asleep:
            self.engine.device.release(self.measured_bytes)
        if self.scratch:
            self.engine.device.release(self.model.spec.scratch_bytes)


class FakeModel:
    def __init__(self, engine: FakeEngine, spec: ModelSpec, name: str) -> None:
        self.engine, self.spec = engine, spec
        self.measured_bytes = spec.weights_bytes
        self.bos = BOS
        self.pools: list[FakePool] = []
        self.loaded, self.asleep = True, False
        self.sleepable, self.backup_bytes = engine.sleepable, 0
        self.info = model_info(spec, name)
        engine.device.check_free(self.measured_bytes, Internal, "load_failed")
        engine.device.allocate(self.measured_bytes, f"weights of {spec.model}")
        engine.device.spend(100)

    def back_up(self) -> None:
        assert self.loaded
        assert self.sleepable
        assert not self.asleep
        if not self.backup_bytes:
            self.engine.faults.back_up()
            self.backup_bytes = self.measured_bytes
            self.engine.device.pinned_bytes += self.backup_bytes
            self.engine.device.spend(50)

    def drop_backup(self) -> None:
        assert not self.asleep
        self.engine.device.pinned_bytes -= self.backup_bytes
        self.backup_bytes = 0

    def sleep(self) -> None:
        assert self.loaded
        assert not self.asleep
        assert self.backup_bytes
        self.engine.faults.sleep()
        self.asleep = True
        self.engine.device.release(self.measured_bytes)
        self.engine.device.spend(0.5)

    def wake(self) -> None:
        assert self.loaded
        if not self.asleep:
            return
        self.engine.faults.wake()
        device = self.engine.device
        device.check_free(self.measured_bytes, ResourceExhausted, "wake_failed")
        device.allocate(self.measured_bytes, f"wake of {self.spec.model}")
        device.spend(10)
        self.asleep = False

    def open_pool(self, shape: PoolShape) -> FakePool:
        assert self.loaded
        self.engine.faults.open(shape)
        pool = FakePool(self, shape)
        self.pools.append(pool)
        return pool

    def token_bytes_max(self) -> int | None:
        return max(len(text) for text in SPECIAL)

    def tokenize(self, text: str, *, first: bool, most: int | None = None) -> Tokens:
        assert self.loaded
        ids: list[int] = []
        end = 0
        for match in _CONTROL.finditer(text):
            ids += self._plain(text[end : match.start()])
            ids.append(SPECIAL[match[0]])
            end = match.end()
        ids += self._plain(text[end:])
        if first and ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return np.array(ids, np.int32)

    def _plain(self, text: str) -> list[int]:
        if text and not self.spec.joins:
            text = " " + text
        ids: list[int] = []
        data = text.encode()
        index = 0
        while index < len(data):
            pair = data[index : index + 2].decode("latin-1")
            if pair in PAIRS:
                ids.append(FIRST_PAIR + PAIRS.index(pair))
                index += 2
            else:
                ids.append(data[index])
                index += 1
        return ids

    def joins(self) -> bool:
        return self.spec.joins

    def piece(self, token: int, *, special: bool) -> bytes:
        assert self.loaded
        if token in NAMES:
            return NAMES[token] if special else b""
        if token >= FIRST_PAIR:
            return PAIRS[token - FIRST_PAIR].encode()
        return bytes([token])

    def is_eog(self, token: int) -> bool:
        return token == EOG

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        if not self.spec.template:
            raise FailedPrecondition("no_chat_template", "no template")
        text = "".join(f"<|{item.role}|>{item.content}<|end|>\n" for item in messages)
        return text + ("<|assistant|>" if generate else "")

    def sampler(
        self,
        sampling: Sampling,
        bias: Sequence[tuple[int, float]],
        seed: int,
        *,
        grammar: str | None = None,
        json_schema: dict[str, Any] | None = None,
    ) -> FakeSampler:
        assert grammar is None, "grammars need real vocabularies"
        assert json_schema is None, "grammars need real vocabularies"
        if sampling.top_k is not None and sampling.top_k < 0:
            raise InvalidArgument("bad_sampling", "top_k is negative", parameter="top_k")
        return FakeSampler(sampling, seed)

    def close(self) -> None:
        assert self.loaded
        assert not any(pool.open for pool in self.pools)
        self.loaded = False
        if not self.asleep:
            self.engine.device.release(self.measured_bytes)
        self.engine.device.pinned_bytes -= self.backup_bytes
        self.backup_bytes = 0


class FakeEngine:
    """See the module. ``loads`` and ``decoded_tokens`` count work. ``sleepable``: models and pools
    are; ``Faults`` refuse backups and wakes, as ``FakeDevice.foreign_bytes`` does."""

    device_kind: Literal["cuda", "cpu"] = "cpu"
    build = "fake-1"
    estimator: Estimator

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        device: FakeDevice | None = None,
        batch_tokens: int = 16,
        *,
        sleepable: bool = False,
    ) -> None:
        self.sleepable = sleepable
        self.mechanism: Literal["vmm-sleep", "state-swap"]
        self.mechanism = "vmm-sleep" if sleepable else "state-swap"
        self.mechanism_note = "so the test wants it"
        self.device = device or FakeDevice()
        self.specs = {spec.path: spec for spec in specs}
        self.batch_tokens = batch_tokens
        self.faults = Faults()
        self.loads: list[str] = []
        self.decoded_tokens = 0

    def load(self, path: str, name: str) -> FakeModel:
        self.faults.load(path)
        self.loads.append(path)
        return FakeModel(self, self.specs[path], name)

    def used_bytes(self) -> int | None:
        if self.device_kind == "cpu":
            return None
        return self.device.allocated_bytes + self.device.foreign_bytes


def model_info(spec: ModelSpec, name: str = "fake") -> ModelInfo:
    return ModelInfo(
        model=spec.model,
        name=name,
        path=spec.path,
        file_bytes=spec.weights_bytes,
        arch="fake",
        n_ctx_train=4096,
        n_vocab=N_VOCAB,
        chat_template=spec.template,
        rollback=spec.rollback,
    )


def reference(
    spec: ModelSpec,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    n_ctx: int = 1 << 30,
) -> list[int]:
    """What a model that has never been disturbed generates."""
    cache = Cache(spec.rollback)
    sampler = FakeSampler(sampling, seed)
    last_n = sampling.penalty_last_n or 0
    for token in prompt[len(prompt) - min(last_n, len(prompt)) :]:
        sampler.accept(token)
    for token in prompt:
        cache.add(token)
    answer: list[int] = []
    while True:
        token = sampler.choose(cache.digest())
        answer.append(token)
        if token == EOG or len(answer) >= max_tokens or len(prompt) + len(answer) >= n_ctx:
            return answer
        cache.add(token)
