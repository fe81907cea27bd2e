"""What a forward pass is given, and what it must do for the pipeline. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vram_conductor.protocol.errors import InvalidArgument


@dataclass(frozen=True)
class Capacity:
    """The limits of one engine: what its memory is allocated for.

    Attributes:
        n_ctx: positions of a sequence, in tokens.
        sequences: independent sequences in the KV cache.
        tokens_max: tokens of one batch.
        wanted_max: tokens of one batch whose logits can be had.
    """

    n_ctx: int
    sequences: int = 1
    tokens_max: int = 512
    wanted_max: int = 1

    def __post_init__(self) -> None:
        """Raises InvalidArgument ``bad_capacity`` where one is not positive."""
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidArgument(
                    "bad_capacity", f"{name} is {value}; it is 1 or more", name=name, value=value
                )


@dataclass(frozen=True)
class Batch:
    """Tokens of one pass; all arrays are int32.

    Attributes:
        tokens: ids (n,).
        positions: of each token in its sequence, from 0 (n,).
        sequences: that each token belongs to (n,).
        wanted: indices into the n tokens, of those whose logits are returned, in this order.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    wanted: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        tokens: ArrayLike,
        positions: ArrayLike,
        sequences: ArrayLike = 0,
        wanted: ArrayLike | None = None,
    ) -> Batch:
        """From anything that NumPy reads as integers.

        ``positions`` and ``sequences`` may be one number: the position of the first token, the
        others following it, and the sequence of all. ``wanted`` is the last token by default.

        Raises:
            InvalidArgument: ``empty_batch``; ``bad_batch``: not integers of 32 bits, or arrays
                of different lengths.
        """
        ids = _integers("tokens", tokens)
        count = len(ids)
        if not count:
            raise InvalidArgument(
                "empty_batch", "a step takes at least one token; this one has 0", tokens=0
            )
        at = _integers("positions", positions)
        if not np.ndim(positions):
            at = _integers("positions", at.astype(np.int64) + np.arange(count))
        of = _integers("sequences", sequences)
        if not np.ndim(sequences):
            of = np.repeat(of, count)
        if not count == len(at) == len(of):
            raise InvalidArgument(
                "bad_batch",
                f"{count} tokens with {len(at)} positions and {len(of)} sequences; "
                "give as many of each",
                tokens=count,
                positions=len(at),
                sequences=len(of),
            )
        return cls(ids, at, of, _integers("wanted", [count - 1] if wanted is None else wanted))

    def __len__(self) -> int:
        return len(self.tokens)


class Forward(Protocol):
    """The computation of a pass, unit by unit; owns the activations and the KV cache's bytes."""

    @property
    def kv_bytes(self) -> int:
        """Of the KV cache, all sequences and layers."""
        ...

    @property
    def activation_bytes(self) -> int:
        """Of everything else that it allocated where it computes."""
        ...

    def begin(self, batch: Batch) -> None:
        """Take a batch, which fits the capacity, and embed its tokens."""

    def unit(self, index: int, slot: Any) -> None:
        """Compute unit ``index`` of the layout, whose bytes are in ``slot``.

        Units come in order. On cuda it issues kernels onto the compute stream; on the host it
        has computed when it returns.
        """

    def logits(self) -> NDArray[np.float32]:
        """(len(batch.wanted), n_vocab), once all units are done."""
        ...

    def best(self) -> NDArray[np.int32]:
        """The entry with the largest logit of each wanted token (len(batch.wanted),), the first of
        several; instead of :meth:`logits`."""
        ...

    def close(self) -> None:
        """Free the memory; more than once is fine."""


def _integers(name: str, values: ArrayLike) -> NDArray[np.int32]:
    try:
        array = np.atleast_1d(np.asarray(values))
    except ValueError as error:
        raise InvalidArgument(
            "bad_batch", f"{name} are no row of integers: {error}", name=name
        ) from None
    if not array.size:
        return np.zeros(0, np.int32)
    limits = np.iinfo(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            "bad_batch",
            f"{name} is an array of shape {array.shape} and type {array.dtype}; "
            "give one row of integers",
            name=name,
        )
    if array.min() < limits.min or array.max() > limits.max:
        raise InvalidArgument(
            "bad_batch",
            f"{name} has {array.min()} to {array.max()}, beyond 32 bits",
            name=name,
            least=int(array.min()),
            most=int(array.max()),
        )
    return array.astype(np.int32)
