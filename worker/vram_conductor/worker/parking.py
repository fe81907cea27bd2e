"""KV between slots and the store: park, and bring back as much as is right.

Whatever goes wrong here costs time, never a conversation: the slot ends up empty, the reason is
kept, and the job computes its prompt again from the transcript.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from vram_conductor.protocol.errors import ConductorError, Internal
from vram_conductor.worker.engine import Pool, Tokens
from vram_conductor.worker.outbox import info_of
from vram_conductor.worker.residency import Conversation, PoolState, Residency, Slot
from vram_conductor.worker.reuse import Reuse
from vram_conductor.worker.shared_store import SharedStore
from vram_conductor.worker.store import ParkedMeta, tokens_hash
from vram_conductor.worker.surplus import short_bytes, victims
from vram_conductor.worker.tape import common_prefix

log = logging.getLogger(__name__)

_FULL = {"arena_full", "disk_full"}


class Parking:
    """Moves states. ``build`` and ``params`` are part of their identity.

    The engine thread and the hauler may use it at the same time, for different pools.
    """

    def __init__(
        self,
        residency: Residency,
        store: SharedStore,
        build: str,
        params: str,
        clock: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._residency = residency
        self._store = store
        self._build = build
        self._params = params

    # --- out ----------------------------------------------------------------------------------

    def park(self, pool: PoolState, slot: Slot) -> int:
        """Make sure that the store holds what the slot holds, or better; returns the bytes
        written. Errors are logged and kept as the conversation's ``lost``."""
        conversation = slot.conversation
        if conversation is None or len(slot.tape) == 0 or slot.clean or not pool.handle:
            return 0
        try:
            with self._store.lock:
                if self._has_better(conversation, pool, slot):
                    return 0
                written = self._write(conversation, pool, pool.handle, slot)
                # Before anybody else can give this very state up.
                conversation.lost = ""
                slot.clean = True
        except Exception as error:
            info = info_of(error)
            bug = error if info.reason == "internal_error" else None
            log.warning("%s is not parked: %s", conversation.key, info.message, exc_info=bug)
            conversation.lost = f"not_parked: {info.reason}"
            return 0
        return written

    def _has_better(self, conversation: Conversation, pool: PoolState, slot: Slot) -> bool:
        """Whether the parked state covers at least as much of what comes next as the slot."""
        work = slot.job.work if slot.job else conversation.transcript.ids
        parked = self._parked_ids(conversation, pool, work.view())
        if parked is None:
            return False
        useful = common_prefix(slot.tape.view(), work.view())
        return common_prefix(parked, work.view()) == len(parked) >= useful

    def _write(self, conversation: Conversation, pool: PoolState, handle: Pool, slot: Slot) -> int:
        key = conversation.key
        need = handle.state_bytes(slot.index)
        agent = self._residency.agents.get(key.agent_key)
        largest = max(need, agent.state_bytes if agent else 0)
        view = self._writer(conversation, need, largest)
        begin = self._clock()
        try:
            written = handle.get_state(slot.index, view)
        finally:
            view.release()
        self._residency.rates.note("state_out", written, (self._clock() - begin) / 1e6)
        ids = slot.tape.ids()
        self._store.commit(self._meta(conversation, pool, ids, written))
        conversation.parked_ids = ids
        return written

    def _meta(
        self, conversation: Conversation, pool: PoolState, ids: Tokens, payload_bytes: int
    ) -> ParkedMeta:
        return ParkedMeta(
            conversation=conversation.key,
            model=pool.weights.model,
            build=self._build,
            kv_type=pool.want.kv_type,
            params=self._params,
            tokens_hash=tokens_hash(ids),
            n_tokens=len(ids),
            payload_bytes=payload_bytes,
        )

    def _writer(self, conversation: Conversation, need: int, largest: int) -> memoryview:
        """Where the store is full, states that nobody was promised make room."""
        key = conversation.key
        while True:
            try:
                return self._store.writer(key, need, largest)
            except ConductorError as error:
                if error.reason not in _FULL:
                    raise
                promised = {a.key: a.state_bytes for a in self._residency.agents.values()}
                keys = self._store.keys()
                parked = [(other, self._store.bytes(other)) for other in keys]
                short = short_bytes(error.info.details)
                chosen = victims(key, need, parked, promised, short)
                if not chosen:
                    raise
                for victim in chosen:
                    talk = self._residency.conversations[victim]
                    self._give_up(talk, f"not_parked: {error.reason}")

    def _give_up(self, conversation: Conversation, reason: str) -> None:
        self.discard(conversation)
        # Read once: others may empty it at any moment, see vacate().
        slot = conversation.slot
        if slot is not None:
            slot.clean = False
        else:
            conversation.lost = reason

    def discard(self, conversation: Conversation) -> None:
        """Delete the parked state. Idempotent."""
        with self._store.lock:
            self._store.delete(conversation.key)
            conversation.parked_ids = None

    # --- back ---------------------------------------------------------------------------------

    def resume(
        self, conversation: Conversation, pool: PoolState, slot: Slot, work: Tokens
    ) -> Reuse:
        """Let ``slot`` hold KV of the longest right prefix of ``work``, shorter than ``work``.

        The conversation is in ``slot`` already, or in none and ``slot`` is empty.
        """
        assert pool.handle is not None
        if conversation.slot is None:
            assert slot.conversation is None
            slot.conversation, conversation.slot, conversation.pool = conversation, slot, pool
        with self._store.lock:
            return self._resume(conversation, pool, slot, work)

    def _resume(
        self, conversation: Conversation, pool: PoolState, slot: Slot, work: Tokens
    ) -> Reuse:
        held = min(common_prefix(slot.tape.view(), work), len(work) - 1)
        parked = self._parked_ids(conversation, pool, work)
        offered = 0 if parked is None else min(common_prefix(parked, work), len(work) - 1)
        reason = conversation.lost
        if held and held >= offered:
            if self._truncate(pool, slot, held):
                return Reuse(held, reason=reason)
            reason = self._rollback_reason(pool)
            if parked is not None and len(parked) >= len(slot.tape):
                offered = 0
        self.clear(pool, slot)
        if parked is None:
            if self._store.meta(conversation.key) is not None:
                self.discard(conversation)
                reason = reason or "state_mismatch"
            return Reuse(reason=reason or "state_missing")
        if offered == 0 or (self._never_rolls_back(pool) and offered < len(parked)):
            return Reuse(reason=reason or self._rollback_reason(pool))
        return self._restore(conversation, pool, slot, parked, offered, reason)

    def _restore(
        self,
        conversation: Conversation,
        pool: PoolState,
        slot: Slot,
        parked: Tokens,
        offered: int,
        reason: str,
    ) -> Reuse:
        assert pool.handle is not None
        try:
            found = self._store.read(conversation.key)
            if found is None:
                return Reuse(reason="state_missing")
            meta, view = found
            begin = self._clock()
            try:
                pool.handle.set_state(slot.index, view)
            finally:
                view.release()
            took_ms = (self._clock() - begin) / 1e6
            self._residency.rates.note("state_in", meta.payload_bytes, took_ms)
            last = pool.handle.pos_max(slot.index)
            if last != meta.n_tokens - 1:
                raise Internal(
                    "state_failed",
                    f"a state of {meta.n_tokens} tokens was restored and ends at position {last}",
                    n_tokens=meta.n_tokens,
                    position=last,
                )
        except Exception as error:
            # A failed restore may leave a part behind: the slot is emptied in any case.
            info = info_of(error)
            bug = error if info.reason == "internal_error" else None
            log.warning("%s is not restored: %s", conversation.key, info.message, exc_info=bug)
            self.clear(pool, slot)
            self.discard(conversation)
            known = info.reason in ("state_corrupt", "state_failed")
            return Reuse(reason=info.reason if known else "state_failed")
        slot.tape.replace(parked)
        slot.clean = True
        if not self._truncate(pool, slot, offered):
            self.clear(pool, slot)
            return Reuse(bytes=meta.payload_bytes, reason=self._rollback_reason(pool))
        return Reuse(offered, restored=True, bytes=meta.payload_bytes, reason=reason)

    def _parked_ids(
        self, conversation: Conversation, pool: PoolState, work: Tokens
    ) -> Tokens | None:
        """Ids of the parked state if it is of this very model, build and context, and its tokens
        are known; an adopted state's are, where they begin the work or the transcript."""
        meta = self._store.meta(conversation.key)
        if meta is None:
            return None
        if conversation.parked_ids is not None:
            candidates = [conversation.parked_ids]
        else:
            record = conversation.transcript.ids.view()
            candidates = [ids[: meta.n_tokens] for ids in (work, record)]
        for ids in candidates:
            if len(ids) == meta.n_tokens:
                ours = self._meta(conversation, pool, ids, meta.payload_bytes)
                if ours == meta:
                    return ids
        return None

    # --- slots --------------------------------------------------------------------------------

    def clear(self, pool: PoolState, slot: Slot) -> None:
        """Empty the sequence; the conversation keeps the slot."""
        if pool.handle:
            pool.handle.truncate(slot.index, 0)
        slot.tape.truncate(0)
        slot.clean = False

    def release(self, pool: PoolState, slot: Slot) -> None:
        """Empty the sequence and the slot."""
        self.clear(pool, slot)
        if slot.conversation is not None:
            slot.conversation.slot = slot.conversation.pool = None
            slot.conversation = None

    def vacate(self, pool: PoolState, slot: Slot) -> None:
        """:meth:`release` what was parked. Another thread may have given that state up by now."""
        conversation, held = slot.conversation, len(slot.tape)
        self.release(pool, slot)
        if conversation and held and not self._store.meta(conversation.key):
            conversation.lost = conversation.lost or "not_parked: arena_full"

    def roll_back(self, conversation: Conversation) -> None:
        """A job was stopped before its first token: leave in the slot only what is of the
        transcript. What can't be rolled back goes; the checkpoint, if any, is still there."""
        pool, slot = conversation.pool, conversation.slot
        if pool is None or slot is None:
            return
        record = conversation.transcript.ids.view()
        keep = common_prefix(slot.tape.view(), record)
        if keep == 0 or not self._truncate(pool, slot, keep):
            self.release(pool, slot)

    def _truncate(self, pool: PoolState, slot: Slot, keep: int) -> bool:
        assert pool.handle is not None
        if keep == len(slot.tape):
            return True
        if not pool.handle.truncate(slot.index, keep):
            return False
        slot.tape.truncate(keep)
        slot.clean = False
        return True

    def _never_rolls_back(self, pool: PoolState) -> bool:
        handle = pool.weights.handle
        return handle is not None and handle.info.rollback == "none"

    def _rollback_reason(self, pool: PoolState) -> str:
        return "rollback_recurrent" if self._never_rolls_back(pool) else "rollback_window"
