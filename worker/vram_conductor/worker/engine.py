"""What the worker's core asks of an inference library: the Engine protocol.

``llama/`` is the only real implementation; tests of the core use a fake one. One thread at a time
uses a pool, and one at a time loads, opens, sleeps and wakes, except where a docstring says
otherwise. Sizes are ints in bytes, token ids int32 arrays, times are measured by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.values import Message, ModelInfo, PoolShape, Sampling

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Estimate:
    """Dry-run sizes, see ``commands.Estimated``."""

    info: ModelInfo
    shape: PoolShape
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    recurrent_bytes: int
    state_bytes: int
    fit_cells: int | None
    cached: bool
    scratch_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        return self.kv_bytes + self.compute_bytes + self.recurrent_bytes


class Estimator(Protocol):
    """Dry runs, callable from a thread of its own: an estimate must not stall a stream."""

    def estimate(
        self, path: str, name: str, shape: PoolShape, n_ctx: int, fit_bytes: int | None
    ) -> Estimate:
        """Raises a ConductorError: ``no_such_model``, ``bad_model``, ``unsupported_model``,
        ``n_ctx_beyond_training``, ``estimate_failed`` …"""
        ...


class Sampler(Protocol):
    """A sampler chain of one job (penalties → bias → top-k … → distribution or greedy). It needs
    no open model: a job that was preempted keeps its sampler while its model is unloaded."""

    @property
    def finished(self) -> bool:
        """By the grammar nothing may follow what was sampled so far. False without one."""
        ...

    def accept(self, token: int) -> None:
        """Tell the penalties about a token that was not sampled here (the prompt)."""

    def close(self) -> None: ...


class Pool(Protocol):
    """One ``llama_context``: ``shape.slots`` sequences in one unified cache."""

    shape: PoolShape
    measured_bytes: int
    """Size of the buffers that were really allocated."""

    @property
    def sleepable(self) -> bool:
        """Whether :meth:`sleep` can give the buffers' memory back. Never changes."""
        ...

    def decode(self, batch: Sequence[tuple[int, Tokens, int, bool]]) -> None:
        """Compute one batch. Each entry: (slot, ids, first position, want logits of the last).

        Raises ConductorError ``kv_full`` (nothing changed), ``decode_failed`` (what the slots of
        the batch hold is unknown: empty them).
        """

    def sample(self, slot: int, sampler: Sampler) -> int:
        """Sample from the logits that the last ``decode`` computed for ``slot``.

        Raises ConductorError ``bad_logits``: they are no numbers; nor, from now on, is what any
        slot of this pool computes: close it. ``grammar_dead_end``, ``grammar_too_ambiguous``:
        the job's own fault.
        """
        ...

    def pos_min(self, slot: int) -> int:
        """First position still in the cache, -1 if the slot is empty."""
        ...

    def pos_max(self, slot: int) -> int:
        """Last position in the cache, -1 if the slot is empty."""
        ...

    def truncate(self, slot: int, keep: int) -> bool:
        """Remove positions >= ``keep``. False, with nothing changed, where a correct rollback is
        impossible (window already gone, recurrent state); ``keep=0`` always succeeds."""
        ...

    def state_bytes(self, slot: int) -> int:
        """Current size of the slot's state; changes with every decode."""
        ...

    def get_state(self, slot: int, into: memoryview) -> int:
        """Copy the slot's state out; returns the bytes written.

        Raises ConductorError ``state_failed``; the slot is unchanged.
        """
        ...

    def set_state(self, slot: int, blob: memoryview) -> None:
        """Replace the slot's state.

        Raises ConductorError ``state_failed``: the slot is then empty. The caller compares
        ``pos_max`` with what the state should hold.
        """

    def warm_up(self) -> None:
        """Compute one full micro-batch and one more token in the empty pool, then clear it: what
        a live context takes beyond its buffers is taken then.

        Raises ConductorError ``decode_failed``; the pool must be closed then.
        """

    def sleep(self) -> None:
        """Give the buffers' memory back; addresses and the context stay. What the slots hold is
        lost: they are empty from now on. Only a ``sleepable`` pool, and one that is awake.

        Until :meth:`wake` only ``pos_min``, ``pos_max``, ``state_bytes``, ``truncate(slot, 0)``
        and :meth:`close` may be called. Raises ConductorError ``sleep_failed``.
        """

    def wake(self) -> None:
        """Take the memory again; every slot is empty, and cleared with its contents.

        Raises ConductorError ``wake_failed``: others have taken the memory; it still sleeps.
        """

    def close(self) -> None:
        """Free the context, awake or asleep. Idempotent."""


class Model(Protocol):
    """Weights and vocabulary of one GGUF."""

    info: ModelInfo
    measured_bytes: int
    bos: int
    """Begin-of-sequence id that a fresh prompt starts with, or -1."""

    @property
    def sleepable(self) -> bool:
        """Whether the weights can sleep, once they are backed up. Never changes."""
        ...

    @property
    def backup_bytes(self) -> int:
        """Pinned host memory that the backup takes; 0: there is none."""
        ...

    def open_pool(self, shape: PoolShape) -> Pool:
        """Create a context. Raises ConductorError ``pool_failed``; nothing stays allocated."""
        ...

    def tokenize(self, text: str, *, first: bool, most: int | None = None) -> Tokens:
        """Ids of ``text`` with special tokens parsed. Any thread, as are all methods up to
        ``sampler``.

        ``first``: the start of a transcript, so BOS is added where the model wants it. ``most``:
        nobody has a use for more ids: where there are more, the last ones may be missing.
        """
        ...

    def token_bytes_max(self) -> int | None:
        """Upper bound of the bytes of text that one token covers; None: there is none."""

    def joins(self) -> bool:
        """Whether text may be tokenised in pieces (False where the tokenizer adds a space in
        front of every piece)."""
        ...

    def piece(self, token: int, *, special: bool) -> bytes:
        """Bytes of one token; may be part of a character. ``special``: render control tokens."""
        ...

    def is_eog(self, token: int) -> bool: ...

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Apply the file's chat template (jinja2 sandbox).

        Raises ConductorError FAILED_PRECONDITION ``no_chat_template``, INVALID_ARGUMENT
        ``bad_messages`` (the template refuses them), ``template_limit``.
        """
        ...

    def sampler(
        self,
        sampling: Sampling,
        bias: Sequence[tuple[int, float]],
        seed: int,
        *,
        grammar: str | None = None,
        json_schema: dict[str, Any] | None = None,
    ) -> Sampler:
        """Build a sampler chain. Raises InvalidArgument with the parameter's name, and what is
        wrong with ``grammar`` or ``json_schema``; FailedPrecondition ``no_vocabulary``."""
        ...

    def back_up(self) -> None:
        """Copy the weights to pinned host memory, once: they never change. Only while awake.

        Raises ConductorError ``backup_failed``; there is none then, and the weights are as before.
        """

    def drop_backup(self) -> None:
        """Give the pinned memory back. Only while awake. Idempotent."""

    def sleep(self) -> None:
        """Give the device's memory back; the backup keeps the contents, addresses stay. Pools stay
        open; their states can still be read, but nothing computes until :meth:`wake`.

        Raises ConductorError ``sleep_failed``: a part of it may be given back; wake or close it.
        """

    def wake(self) -> None:
        """Take the memory again and copy the weights back. May run on another thread than what
        happens to the model's pools meanwhile, as long as these do not compute. Nothing to do
        where they are awake.

        Raises ConductorError ``wake_failed``: others have taken the memory; it still sleeps.
        """

    def close(self) -> None:
        """Free the weights and their backup, awake or asleep. Every pool must be closed before."""


class Engine(Protocol):
    """A loaded inference library on one device."""

    device_kind: Literal["cuda", "cpu"]
    build: str
    """Library build; part of the identity of a parked state."""
    mechanism: Literal["vmm-sleep", "state-swap"]
    """How memory is given back: by sleeping, or only by closing pools and unloading weights."""
    mechanism_note: str
    """Why it is this one, in a sentence for people."""

    @property
    def estimator(self) -> Estimator: ...

    def load(self, path: str, name: str) -> Model:
        """Load weights. Raises a ConductorError, and nothing stays allocated: ``load_failed``,
        ``no_such_model``, ``bad_model``, ``unsupported_model``."""
        ...

    def used_bytes(self) -> int | None:
        """What the device says is in use now, by everybody; None where nobody can tell (cpu)."""
