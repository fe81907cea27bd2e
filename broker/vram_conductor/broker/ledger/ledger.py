"""The ledger of one device: who was promised how many bytes. Pure.

    cap      = (total - reserved), at most the configured capacity, × admission_percent / 100
    promised = base + Σ scratch:<model>@<kv_type> + Σ lease:<name>
             + reserve mode:   Σ weights:<model> + max over pools (pool:<model>@<kv_type>)
             + timeshare mode: max over pools (weights of its model + pool)
    admit ⇔ promised(after) + foreign <= cap, and the host ledger has room for the state

A lease with ``park`` is granted beyond that: agents wait while it is held, so only base, leases
and foreign use must fit beside it. Agents that come back were promised their bytes before; such
leases are not in their way.

A load goes reserve → commit(measured), or reserve → rollback. Reservations of several agents
may be open at once and end in any order. Promises grow in no other way, except that
measurements, base and leases are told; they never grow when something ends.
"""

from __future__ import annotations

from vram_conductor.broker.ledger.accounts import Accounts, Entry
from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import NOTHING_MEASURED, Claim, Measured, pool_key
from vram_conductor.broker.ledger.decisions import (
    Admit,
    Committed,
    Decision,
    Deny,
    DenyCode,
    Lease,
    LeaseKey,
    Reservation,
    Stale,
)
from vram_conductor.broker.ledger.denials import (
    deny,
    deny_blind,
    deny_claim,
    deny_host,
    deny_lease,
)
from vram_conductor.broker.ledger.leases import expiry, make_lease
from vram_conductor.protocol.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from vram_conductor.protocol.values import AgentKey, PoolShape


class Ledger(Accounts):
    """Admission to one device. Every method is O(log agents) at a given number of models."""

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__(spec)
        self._last_id = 0

    # --- decide, reserve --------------------------------------------------------------------

    def decide(self, claim: Claim, now_ns: int, *, returning: bool = False) -> Decision:
        """Would :meth:`reserve` take it? Changes nothing. ``returning``: the agent was here
        before the leases that park agents.

        Raises:
            AlreadyExists: ``agent_in_ledger``.
        """
        self._check_new(claim.agent)
        self._leases.sweep(now_ns)
        blind = deny_blind(self, now_ns, claim)
        if blind:
            return blind
        shape = self._book.shape_with(claim.model, claim.kv_type, claim.n_ctx, claim.slots)
        if shape != claim.shape:
            return Stale(self.device, shape)
        before, foreign = self.promised_bytes, self.foreign_bytes
        before -= self._leases.park_bytes if returning else 0
        growth = self._book.promised_with(claim) - self._book.promised_bytes
        free = self.cap_bytes - before - growth - foreign
        if free < 0:
            return deny_claim(self, DenyCode.CAP, now_ns, growth, claim)
        if self.host_growth_bytes(claim.state_bytes) > self.host_room_bytes:
            return deny_host(self, now_ns, claim)
        return Admit(self.device, growth, free, self._book.model(claim.model) is not None)

    def reserve(
        self, claim: Claim, now_ns: int, *, returning: bool = False
    ) -> Reservation | Stale | Deny:
        """Hold the claim's bytes, or say why not. A refusal changes nothing. ``returning``: as
        in :meth:`decide`.

        Raises:
            AlreadyExists: ``agent_in_ledger``: reserved or committed already.
        """
        decision = self.decide(claim, now_ns, returning=returning)
        if not isinstance(decision, Admit):
            return decision
        self._last_id += 1
        reservation = Reservation(self._last_id, self.device, claim, decision.requested_bytes)
        self._book.hold(claim)
        self._host.add(claim.agent, claim.state_bytes)
        self._entries[claim.agent] = Entry(claim, reservation)
        self._open[reservation.id] = claim.agent
        return reservation

    # --- commit, rollback, release ----------------------------------------------------------

    def commit(
        self, reservation: Reservation, measured: Measured = NOTHING_MEASURED
    ) -> Committed | Deny:
        """The load succeeded: the lines take what was measured, else stay ``unmeasured``.

        More than was reserved is checked again, against the last sample whatever its age (the
        bytes are allocated: waiting makes nothing better). Where it does not fit the answer is
        a Deny with code MEASURED, and the reservation is rolled back.
        ``measured.pool_bytes`` is of the reservation's own shape.

        Raises:
            FailedPrecondition: ``reservation_gone``: it ended before.
        """
        agent = self._open.get(reservation.id)
        if agent is None or reservation.device != self.device:
            raise FailedPrecondition(
                "reservation_gone",
                f"{reservation.claim.agent}'s reservation on {reservation.device} has ended; "
                "reserve again",
            )
        claim = reservation.claim
        refused_bytes = self._measure(claim.model, measured, claim.pool, claim.shape)
        if refused_bytes is not None:
            self.rollback(reservation)
            growth = refused_bytes - self.promised_bytes
            return deny_claim(self, DenyCode.MEASURED, None, growth, claim, measured)
        del self._open[reservation.id]
        self._entries[agent].reservation = None
        self._book.settle(claim)
        return Committed(agent, self.promised_bytes, self.is_unmeasured(agent))

    def rollback(self, reservation: Reservation) -> bool:
        """The load failed: the state is as if the agent had never asked.

        One exception keeps the cap: if a member had left before, so that the pool's size was
        only bounded, and others were admitted since on the better estimate that came with this
        claim, then the estimate stays.

        Returns:
            False, with nothing changed, if the reservation ended before.
        """
        agent = self._open.get(reservation.id)
        if agent is None or reservation.device != self.device:
            return False
        before = self.promised_bytes
        self._forget_entry(agent)
        self._book.withdraw(reservation.claim)
        if self.promised_bytes > max(before, self.cap_bytes - self.foreign_bytes):
            self._book.remember(reservation.claim)
        return True

    def release(self, agent: AgentKey) -> bool:
        """The agent leaves, reserved or committed. False if it is not here. Idempotent."""
        entry = self._entries.get(agent)
        if entry is None:
            return False
        if entry.reservation:
            return self.rollback(entry.reservation)
        self._forget_entry(agent)
        self._book.leave(entry.claim)
        return True

    def _forget_entry(self, agent: AgentKey) -> None:
        entry = self._entries.pop(agent)
        self._host.remove(agent)
        if entry.reservation:
            del self._open[entry.reservation.id]

    # --- measurements -----------------------------------------------------------------------

    def measured(
        self, model: str, measured: Measured, shape: PoolShape | None = None
    ) -> Deny | None:
        """A later measurement (first use of a pool, reload). ``shape``: the pool that
        ``measured.pool_bytes`` belongs to.

        Returns:
            None: booked, or the model or pool has left. A Deny (MEASURED): it grew and does
            not fit; the lines stay as they were, and the worker must free what it allocated.

        Raises:
            InvalidArgument: ``bad_shape``: pool bytes without a shape.
        """
        if measured.pool_bytes is not None and shape is None:
            raise InvalidArgument("bad_shape", "pool bytes were measured, but of which shape?")
        key = pool_key(model, shape.kv_type) if shape else ""
        refused_bytes = self._measure(model, measured, key, shape)
        if refused_bytes is None:
            return None
        growth = refused_bytes - self.promised_bytes
        return deny(self, DenyCode.MEASURED, None, requested_bytes=growth, note=f"model {model}")

    def _measure(
        self, model: str, measured: Measured, pool: str, shape: PoolShape | None
    ) -> int | None:
        """Book a measurement. None: done. Else it grew and does not fit, nothing has changed,
        and this is what would have been promised."""
        before = self.promised_bytes
        undo = self._book.measure(model, measured, pool, shape)
        if undo is None:
            return None
        after = self.promised_bytes
        # Leases that park agents are no reason: these agents were promised their bytes before.
        if after <= before or self.over_bytes <= self._leases.park_bytes:
            self._book.confirm(undo, shape)
            return None
        self._book.take_back(undo)
        return after

    # --- leases -----------------------------------------------------------------------------

    def grant_lease(
        self, key: LeaseKey, lease_bytes: int, now_ns: int, *, park: bool
    ) -> Lease | Deny:
        """Take device memory off the budget for a program outside; :meth:`hold_lease` follows
        when the room is really there. ``park``: agents may have to wait for it.

        Raises:
            AlreadyExists: ``lease_exists``.
            InvalidArgument: ``bad_lease``, ``bad_bytes``.
        """
        self._leases.sweep(now_ns)
        lease = make_lease(key, lease_bytes, park=park)
        if self._leases.get(key):
            raise AlreadyExists(
                "lease_exists", f"{self.device} has a lease {key} already; release it first"
            )
        blind = deny_blind(self, now_ns, None)
        if blind:
            return blind
        taken = self._base_bytes + self._leases.total_bytes if park else self.promised_bytes
        if taken + lease_bytes + self.foreign_bytes > self.cap_bytes:
            return deny_lease(self, now_ns, lease, taken)
        self._leases.add(lease)
        return lease

    def hold_lease(self, key: LeaseKey, ttl_ns: int, now_ns: int) -> Lease | None:
        """The room is there, for ``ttl_ns`` from now; again: that much longer. None if there is
        no such lease (any more).

        Raises:
            InvalidArgument: ``bad_value``.
        """
        self._leases.sweep(now_ns)
        expires_ns = expiry(ttl_ns, now_ns)
        lease = self._leases.get(key)
        if lease is not None and lease.expires_ns is None:
            self._gauge.leased(self._leases.held_bytes)
        return self._leases.hold(key, expires_ns)

    def restore_lease(
        self, key: LeaseKey, lease_bytes: int, ttl_ns: int, now_ns: int, *, park: bool
    ) -> None:
        """A lease from before a restart: it was granted, so nothing is asked now.

        Raises:
            InvalidArgument: ``bad_lease``, ``bad_bytes``, ``bad_value``.
        """
        expires_ns = expiry(ttl_ns, now_ns)
        self._leases.add(make_lease(key, lease_bytes, park=park))
        self._leases.hold(key, expires_ns)

    def release_lease(self, key: LeaseKey) -> bool:
        """End a lease. False if there is none. Idempotent."""
        return self._leases.remove(key)

    def expire(self, now_ns: int) -> list[LeaseKey]:
        """Keys of the leases that have expired since the last call."""
        self._leases.sweep(now_ns)
        return self._leases.take_expired()
