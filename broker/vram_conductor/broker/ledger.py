"""The ledger of one device: who was promised how many bytes. Pure.

    cap      = see capacity.DeviceSpec
    promised = base + Σ scratch:<model> + Σ lease:<name>
             + reserve mode:   Σ weights:<model> + max over pools (pool:<model>@<kv_type>)
             + timeshare mode: max over pools (weights of its model + pool)
    admit ⇔ promised(after) + foreign <= cap, and the host ledger has room for the state

A load goes reserve → commit(measured), or reserve → rollback. Reservations of several agents
may be open at once and end in any order. Bytes change in no other way, except that
measurements, base and leases are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vram_conductor.broker.capacity import DeviceSpec
from vram_conductor.broker.claims import NOTHING_MEASURED, Claim, Measured
from vram_conductor.broker.decisions import (
    Admit,
    Committed,
    Decision,
    Deny,
    Lease,
    Reservation,
    Stale,
)
from vram_conductor.protocol.values import AgentKey, KVType, Line, PoolShape


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as the ledger holds it: ``bytes`` is promised for ``shape``."""

    model: str
    kv_type: KVType
    shape: PoolShape
    bytes: int
    agents: int
    unmeasured: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums for STATUS, in bytes. ``over_bytes``: promised + foreign above the cap (foreign use
    grew, or the device shrank); nothing is admitted while it is > 0."""

    device: str
    cap_bytes: int
    promised_bytes: int
    foreign_bytes: int
    free_bytes: int
    over_bytes: int
    budget_bytes: int
    leases_bytes: int
    host_cap_bytes: int
    host_promised_bytes: int
    disk_cap_bytes: int
    disk_used_bytes: int
    agents: int
    open_reservations: int


class Ledger:
    """One device's ledger. Every method is O(log agents), save the views."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec

    # --- the device -------------------------------------------------------------------------

    def reconfigure(self, spec: DeviceSpec) -> None:
        """Take another capacity, percentage or mode (a worker came back with another card).
        Promises stay; ``over_bytes`` tells when they no longer fit."""
        raise NotImplementedError

    def set_base(self, base_bytes: int) -> None:
        """What the worker's process itself takes on the device (READY.base_bytes)."""
        raise NotImplementedError

    def observe(self, foreign_bytes: int, taken_ns: int) -> None:
        """A memory sample: bytes used by others, leases included (``Memory.foreign_bytes``),
        taken at ``taken_ns`` on the broker's clock (receipt minus ``age_ms``). A sample older
        than the one held is ignored."""
        raise NotImplementedError

    def forget_sample(self) -> None:
        """The worker is gone: nothing is admitted until the next sample."""
        raise NotImplementedError

    @property
    def cap_bytes(self) -> int:
        raise NotImplementedError

    @property
    def promised_bytes(self) -> int:
        raise NotImplementedError

    @property
    def foreign_bytes(self) -> int:
        """What others use, without leases in use; the last sample's, whatever its age."""
        raise NotImplementedError

    @property
    def budget_bytes(self) -> int:
        """What the worker may use: cap - foreign, at least 0."""
        raise NotImplementedError

    # --- preview ----------------------------------------------------------------------------

    def shape_with(
        self, model: str, kv_type: KVType, agent: AgentKey, n_ctx: int, slots: int
    ) -> PoolShape:
        """The pool's shape if ``agent`` joined: what to ask ESTIMATE for. Changes nothing.

        Raises:
            AlreadyExists: ``agent_in_ledger``.
            InvalidArgument: ``bad_n_ctx``, ``bad_slots``.
        """
        raise NotImplementedError

    def shape_without(self, agent: AgentKey) -> PoolShape | None:
        """The shape of the agent's pool if it left; None if it is the last, or not here."""
        raise NotImplementedError

    def decide(self, claim: Claim, now_ns: int) -> Decision:
        """Would :meth:`reserve` take it? Changes nothing.

        Raises:
            AlreadyExists: ``agent_in_ledger``.
        """
        raise NotImplementedError

    def fit_bytes(self, claim: Claim) -> int:
        """How large the claim's pool may be, everything else as claimed; 0: nothing fits.
        Ask ESTIMATE with it, then ``admission.fit_n_ctx``."""
        raise NotImplementedError

    # --- reserve, commit, release -----------------------------------------------------------

    def reserve(self, claim: Claim, now_ns: int) -> Reservation | Stale | Deny:
        """Hold the claim's bytes, or say why not. A refusal changes nothing.

        Raises:
            AlreadyExists: ``agent_in_ledger``: reserved or committed already.
        """
        raise NotImplementedError

    def commit(
        self, reservation: Reservation, measured: Measured = NOTHING_MEASURED
    ) -> Committed | Deny:
        """The load succeeded: the lines take what was measured, else stay ``unmeasured``.

        More than was reserved is checked again: where it does not fit the answer is a Deny
        with code MEASURED, and the reservation is rolled back. ``measured.pool_bytes`` is of
        the reservation's own shape.

        Raises:
            FailedPrecondition: ``reservation_gone``: it ended before.
        """
        raise NotImplementedError

    def rollback(self, reservation: Reservation) -> bool:
        """The load failed: the state is as if the agent had never asked. False, with nothing
        changed, if the reservation ended before."""
        raise NotImplementedError

    def release(self, agent: AgentKey) -> bool:
        """The agent leaves, reserved or committed. False if it is not here. Idempotent."""
        raise NotImplementedError

    def measured(
        self, model: str, measured: Measured, shape: PoolShape | None = None
    ) -> Deny | None:
        """A later measurement (first use of a pool, reload). ``shape``: the pool that
        ``measured.pool_bytes`` belongs to.

        None: booked, or the model or pool has left. A Deny (MEASURED): it grew and does not
        fit; the lines stay as they were, and the worker must free what it allocated.
        """
        raise NotImplementedError

    # --- leases -----------------------------------------------------------------------------

    def grant_lease(
        self, name: str, lease_bytes: int, ttl_ns: int | None, now_ns: int
    ) -> Lease | Deny:
        """Promise device memory to a program outside, for ``ttl_ns`` (None: until released).

        Raises:
            AlreadyExists: ``lease_exists``.
            InvalidArgument: ``bad_bytes``, ``bad_lease``.
        """
        raise NotImplementedError

    def renew_lease(self, name: str, ttl_ns: int | None, now_ns: int) -> Lease | None:
        """Move the expiry; None if there is no such lease (any more)."""
        raise NotImplementedError

    def release_lease(self, name: str) -> bool:
        """End a lease. False if there is none. Idempotent."""
        raise NotImplementedError

    def expire(self, now_ns: int) -> list[str]:
        """Names of the leases that have expired since the last call."""
        raise NotImplementedError

    # --- views ------------------------------------------------------------------------------

    def __contains__(self, agent: AgentKey) -> bool:
        """Whether the agent is reserved or committed here."""
        raise NotImplementedError

    def agents(self) -> Iterator[AgentKey]:
        """Everybody here, reserved or committed, in order of arrival."""
        raise NotImplementedError

    def claim_of(self, agent: AgentKey) -> Claim | None:
        """The agent's claim; None if it is not here."""
        raise NotImplementedError

    def pool(self, model: str, kv_type: KVType) -> PoolView | None:
        """A pool's shape and size now; None if nobody uses it."""
        raise NotImplementedError

    def holds_model(self, model: str) -> bool:
        """Whether the model's weights are promised here."""
        raise NotImplementedError

    def lines(self) -> tuple[Line, ...]:
        """The promised lines: base, weights, scratch, pools, leases. Pools take turns: their
        sum is not the promise."""
        raise NotImplementedError

    def host_lines(self) -> tuple[Line, ...]:
        """The host ledger's lines: ``state:<agent>``, ``pinned:<model>``."""
        raise NotImplementedError

    def totals(self) -> Totals:
        """All sums."""
        raise NotImplementedError

    def validate_state(self) -> None:
        """Recount everything. O(agents).

        Raises:
            AssertionError: a sum is wrong: our bug.
        """
        raise NotImplementedError


__all__ = ["Admit", "Ledger", "PoolView", "Totals"]
