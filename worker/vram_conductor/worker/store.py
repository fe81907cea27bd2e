"""What the worker's core asks of the place where parked KV states lie: the Store protocol.

``kvstore.py`` implements it over arenas in shared memory; tests of the core use one in plain
memory. A store is used by the engine thread only (a checksum may be computed on another thread,
but every method here is called on one). *Pure*: this module holds types and one hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from vram_conductor.protocol.values import ConversationKey, KVType


def tokens_hash(ids: NDArray[np.int32]) -> int:
    """xxh3_64 of ``ids`` as little-endian int32: identity of a parked state's tokens."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i4").tobytes())


@dataclass(frozen=True)
class ParkedMeta:
    """Identity of a parked state. It may be restored only where all of it fits.

    Attributes:
        conversation: whose it is.
        model: ``ModelInfo.model``.
        build: ``Engine.build``.
        kv_type: element type of the KV cache.
        params: fingerprint of everything else that a state depends on (adapters and their
            scales, context parameters); compared as a whole, at most 64 characters.
        tokens_hash: :func:`tokens_hash` of the ids whose KV the state holds.
        n_tokens: how many they are.
        payload_bytes: length of the state itself.
    """

    conversation: ConversationKey
    model: str
    build: str
    kv_type: KVType
    params: str
    tokens_hash: int
    n_tokens: int
    payload_bytes: int


class Store(Protocol):
    """At most one committed state per conversation; a crash while one is written leaves the
    previous one.

    Views are the caller's to release (``with store.writer(…) as view``), before any other call
    for the same conversation.
    """

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the store may take in all."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that it takes now, whole arenas counted."""
        ...

    @property
    def lent_bytes(self) -> int:
        """Bytes of the capacity that are lent to others, see :meth:`lend`."""
        ...

    @property
    def beside_bytes(self) -> int:
        """Host memory of this device that is no room for states, because the file system that they
        lie in is smaller than what was given."""
        ...

    def lend(self, size_bytes: int) -> bool:
        """Let others have ``size_bytes`` more of the capacity (pinned copies of weights), until
        :meth:`take_back`. Spare halves make room, committed states never: False and nothing has
        changed where they leave less. What is lent counts for :meth:`writer` as if it were used.
        """
        ...

    def take_back(self, size_bytes: int) -> None:
        """Undo :meth:`lend` for ``size_bytes`` (at most :attr:`lent_bytes`)."""

    def writer(self, key: ConversationKey, need_bytes: int, max_bytes: int) -> memoryview:
        """A writable view of exactly ``need_bytes`` for a new state of ``key``.

        The committed state stays readable until :meth:`commit`. A later ``writer`` call without
        a commit between discards what was written. ``max_bytes`` is the largest state that this
        conversation will have, for sizing (``need_bytes`` wins where it is larger).

        Raises:
            ResourceExhausted: ``arena_full`` (the store's cap) or ``disk_full`` (the file
                system); nothing has changed, the committed state is still there.
        """
        ...

    def commit(self, meta: ParkedMeta) -> None:
        """Make the state that was written to ``writer(meta.conversation, …)`` the committed one.

        ``meta.payload_bytes`` may be smaller than the view was. Cheap: a checksum of the payload
        is computed in the background.
        """

    def meta(self, key: ConversationKey) -> ParkedMeta | None:
        """Identity of the committed state; None if there is none."""

    def read(self, key: ConversationKey) -> tuple[ParkedMeta, memoryview] | None:
        """The committed state and a read-only view of its payload; None if there is none.

        A state from a previous life or from disk is verified at its first read.

        Raises:
            DataLoss: ``state_corrupt``: the state has been deleted.
        """

    def delete(self, key: ConversationKey) -> None:
        """Forget a conversation's state and free its bytes. Idempotent."""

    def keys(self) -> list[ConversationKey]:
        """Conversations with a committed state, adopted too; the least recently used one first."""
        ...

    def pinned(self, key: ConversationKey) -> bool:
        """Whether the committed state lies in pinned memory now, from where it is copied fast."""
        ...

    def bytes(self, key: ConversationKey) -> int:
        """Bytes that a conversation's committed state takes (0 if it has none)."""
        ...
