"""What an agent asks of a ledger, and what a load really took. Pure.

A :class:`Claim` is made from the worker's estimate for the pool's shape *with* the new agent
(``Ledger.shape_with``); a :class:`Measured` from the worker's LOADED. Both check their numbers
when they are made: a ledger never sees a negative or absurd byte count.
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Estimated, Loaded
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import AgentKey, KVType, PoolShape


def check_bytes(name: str, value: int) -> int:
    """``value`` if it is a possible byte count.

    Raises:
        InvalidArgument: ``bad_bytes``: not an int, negative, or above ``BYTES_MAX``.
    """
    if type(value) is not int or not 0 <= value <= limits.BYTES_MAX:
        raise InvalidArgument(
            "bad_bytes",
            f"{name} is {value!r}; it must be an int from 0 to {limits.BYTES_MAX}",
            name=name,
            max_bytes=limits.BYTES_MAX,
        )
    return value


def check_range(name: str, value: int, low: int, high: int) -> int:
    """``value`` if it is an int in [low, high].

    Raises:
        InvalidArgument: ``bad_value``.
    """
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(
            "bad_value",
            f"{name} is {value!r}; it must be an int from {low} to {high}",
            field=name,
            minimum=low,
            maximum=high,
        )
    return value


def pad_cells(n_ctx: int) -> int:
    """KV cells that a context of ``n_ctx`` tokens takes: llama.cpp pads to ``N_CTX_PAD``."""
    return -(-n_ctx // limits.N_CTX_PAD) * limits.N_CTX_PAD


def pool_key(model: str, kv_type: KVType) -> str:
    """The pool's name in ledger lines: ``<model>@<kv_type>``."""
    return f"{model}@{kv_type}"


@dataclass(frozen=True, slots=True)
class Claim:
    """One agent's request to a device's ledger.

    Attributes:
        agent: who asks.
        model: ``ModelInfo.model``.
        kv_type: element type of the KV cache; with ``model`` it names the pool.
        n_ctx: the agent's guaranteed context, in tokens, as requested (never the context that
            the model was trained with).
        slots: slots the agent asks for; the pool has the largest number any member asks for.
        shape: the pool's shape with this agent in it, which ``pool_bytes`` was estimated for.
        weights_bytes: the model's weights on the device.
        pool_bytes: the whole pool of ``shape`` on the device: KV + compute + recurrent.
        state_bytes: this agent's largest parked state, in host memory.
        scratch_bytes: what a live context takes beyond its buffers, asleep or awake.
        label: free text for people, for example the file's name.

    Raises:
        InvalidArgument: ``bad_bytes``, ``bad_value``, ``bad_model``, ``bad_shape``.
    """

    agent: AgentKey
    model: str
    kv_type: KVType
    n_ctx: int
    slots: int
    shape: PoolShape
    weights_bytes: int
    pool_bytes: int
    state_bytes: int = 0
    scratch_bytes: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        if not self.model or len(self.model) > limits.NAME_CHARS_MAX:
            raise InvalidArgument(
                "bad_model",
                f"a model's id has 1 to {limits.NAME_CHARS_MAX} characters, "
                f"this one has {len(self.model)}",
            )
        check_range("n_ctx", self.n_ctx, 1, limits.N_CTX_MAX)
        check_range("slots", self.slots, 1, limits.SLOTS_MAX)
        check_bytes("weights_bytes", self.weights_bytes)
        check_bytes("pool_bytes", self.pool_bytes)
        check_bytes("state_bytes", self.state_bytes)
        check_bytes("scratch_bytes", self.scratch_bytes)
        holds = self.shape.cells >= pad_cells(self.n_ctx) and self.shape.slots >= self.slots
        if not holds or self.shape.kv_type != self.kv_type:
            raise InvalidArgument(
                "bad_shape",
                f"a pool of {self.shape.cells} {self.shape.kv_type} cells and "
                f"{self.shape.slots} slots cannot hold an agent of {self.n_ctx} "
                f"{self.kv_type} tokens and {self.slots} slots",
            )

    @property
    def pool(self) -> str:
        """The pool's key."""
        return pool_key(self.model, self.kv_type)

    @staticmethod
    def of(estimated: Estimated, agent: AgentKey, n_ctx: int, slots: int) -> Claim:
        """The claim that an ESTIMATED reply supports. ``n_ctx``, ``slots``: the agent's own.

        Raises:
            InvalidArgument: as the class.
        """
        return Claim(
            agent=agent,
            model=estimated.model.model,
            kv_type=estimated.shape.kv_type,
            n_ctx=n_ctx,
            slots=slots,
            shape=estimated.shape,
            weights_bytes=estimated.weights_bytes,
            pool_bytes=estimated.pool_bytes,
            state_bytes=estimated.state_bytes,
            scratch_bytes=estimated.scratch_bytes,
            label=estimated.model.name,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What was really allocated, in bytes; None: not allocated yet, the estimate stays.

    Raises:
        InvalidArgument: ``bad_bytes``.
    """

    weights_bytes: int | None = None
    pool_bytes: int | None = None
    scratch_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("weights_bytes", "pool_bytes", "scratch_bytes"):
            value = getattr(self, name)
            if value is not None:
                check_bytes(name, value)

    @staticmethod
    def of(loaded: Loaded) -> Measured:
        """From a LOADED reply. Raises InvalidArgument ``bad_bytes``."""
        return Measured(loaded.weights_bytes, loaded.pool_bytes, loaded.scratch_bytes)


NOTHING_MEASURED = Measured()
