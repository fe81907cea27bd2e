"""The state of one device's ledger: inputs, sums, views; no decisions. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vram_conductor.broker.ledger.book import Book
from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim, Measured, check_bytes, check_range, pool_key
from vram_conductor.broker.ledger.decisions import Lease, Reservation
from vram_conductor.broker.ledger.foreign import ForeignGauge
from vram_conductor.broker.ledger.host import HostLedger
from vram_conductor.broker.ledger.leases import Leases
from vram_conductor.broker.ledger.views import PoolView, Totals
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import AlreadyExists, InvalidArgument
from vram_conductor.protocol.values import AgentKey, KVType, Line, PoolShape


@dataclass(slots=True)
class Entry:
    """An agent here. ``reservation``: while its load is in progress."""

    claim: Claim
    reservation: Reservation | None


class Accounts:
    """What is promised on one device, and what is known about the device."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self._book = Book(spec.mode)
        self._host = HostLedger()
        self._leases = Leases()
        self._gauge = ForeignGauge()
        self._base_bytes = 0
        self._disk_used_bytes = 0
        self._entries: dict[AgentKey, Entry] = {}
        self._open: dict[int, AgentKey] = {}

    # --- inputs -----------------------------------------------------------------------------

    def reconfigure(self, spec: DeviceSpec) -> None:
        """Take another capacity, percentage, host cap or mode (the worker said READY, or came
        back with another card). Promises stay; ``over_bytes`` tells when they no longer fit.

        Raises:
            InvalidArgument: ``bad_device``: it is the spec of another device.
        """
        if spec.device != self.spec.device:
            raise InvalidArgument(
                "bad_device", f"this is the ledger of {self.spec.device}, not of {spec.device}"
            )
        if spec.mode != self.spec.mode:
            self._book.set_mode(spec.mode)
        self.spec = spec

    def set_base(self, base_bytes: int) -> None:
        """What the worker's process itself takes. Raises InvalidArgument ``bad_bytes``."""
        self._base_bytes = check_bytes("base_bytes", base_bytes)

    def observe(self, foreign_bytes: int, taken_ns: int, leased_bytes: int | None = None) -> bool:
        """A memory sample, taken between moves.

        Args:
            foreign_bytes: used by others, leases included (``Memory.foreign_bytes``).
            taken_ns: when, on the broker's clock: receipt minus ``age_ms``.
            leased_bytes: the part of it that lease holders use, where the sampler knows.

        Returns:
            False if it is older than the sample held, and was ignored.

        Raises:
            InvalidArgument: ``bad_bytes``.
        """
        return self._gauge.observe(foreign_bytes, taken_ns, self._leases.held_bytes, leased_bytes)

    def forget_sample(self) -> None:
        """The worker is gone: nothing is admitted until the next sample."""
        self._gauge.forget()

    def set_pinned_backup(self, model: str, pinned_bytes: int) -> None:
        """Size of a model's pinned backups in host memory; 0 removes it. Raises as below."""
        self._host.set_pinned(model, check_bytes("pinned_bytes", pinned_bytes))

    def set_disk_used(self, used_bytes: int) -> None:
        """Size of the spilled states. Raises InvalidArgument ``bad_bytes``."""
        self._disk_used_bytes = check_bytes("disk_used_bytes", used_bytes)

    # --- sums -------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return self.spec.device

    @property
    def cap_bytes(self) -> int:
        return self.spec.cap_bytes

    @property
    def promised_bytes(self) -> int:
        return self._book.promised_bytes + self._base_bytes + self._leases.total_bytes

    @property
    def foreign_bytes(self) -> int:
        """What others use, without leases in use; the last sample's, whatever its age."""
        return self._gauge.foreign_bytes(self._leases.held_bytes)

    @property
    def base_bytes(self) -> int:
        """What the worker's process itself takes."""
        return self._base_bytes

    @property
    def agents_bytes(self) -> int:
        """What is promised to agents, and the base."""
        return self._base_bytes + self._book.promised_bytes

    @property
    def leases_bytes(self) -> int:
        """All leases, also those for which room is still being made."""
        return self._leases.total_bytes

    @property
    def room_bytes(self) -> int:
        """cap - foreign - leases; negative where others use more than is left to them."""
        return self.cap_bytes - self.foreign_bytes - self._leases.total_bytes

    @property
    def budget_bytes(self) -> int:
        """What the worker may use: cap - foreign - leases, at least 0."""
        return max(0, self.room_bytes)

    @property
    def over_bytes(self) -> int:
        """Promised + foreign above the cap: foreign use grew, the device shrank, or agents wait
        for a lease."""
        return max(0, self.promised_bytes + self.foreign_bytes - self.cap_bytes)

    @property
    def host_room_bytes(self) -> int:
        """What the host ledger can still promise."""
        return max(0, self.spec.host_cap_bytes - self._host.total_bytes)

    @property
    def host_promised_bytes(self) -> int:
        return self._host.total_bytes

    def host_growth_bytes(self, state_bytes: int) -> int:
        """What the host ledger would promise for one more state of this size."""
        return self._host.growth_bytes(state_bytes)

    @property
    def host_largest_state_bytes(self) -> int:
        """The largest state that the host ledger can still promise."""
        return self._host.largest_state(self.host_room_bytes)

    def alone_bytes(self, claim: Claim, measured: Measured) -> int:
        """The least that the device must promise for this agent even if all others left:
        what is known of it, with base and without leases."""
        return self._base_bytes + self._book.alone_bytes(claim, measured)

    @property
    def sample_taken_ns(self) -> int | None:
        """When the memory sample was taken; None: there is none."""
        return self._gauge.taken_ns

    def sample_is_stale(self, now_ns: int) -> bool:
        """Whether the memory sample is too old to admit anybody on; also if there is none."""
        age_ns = self._gauge.age_ns(now_ns)
        return age_ns is None or age_ns > self.spec.sample_max_age_ns

    def sample_age_ms(self, now_ns: int) -> int | None:
        """Age of the memory sample; None: there is none."""
        age_ns = self._gauge.age_ns(now_ns)
        return None if age_ns is None else age_ns // 1_000_000

    # --- previews ---------------------------------------------------------------------------

    def shape_with(
        self, model: str, kv_type: KVType, agent: AgentKey, n_ctx: int, slots: int
    ) -> PoolShape:
        """The pool's shape if ``agent`` joined: what to ask ESTIMATE for. Changes nothing.

        Raises:
            AlreadyExists: ``agent_in_ledger``.
            InvalidArgument: ``bad_value`` (n_ctx, slots).
        """
        self._check_new(agent)
        check_range("n_ctx", n_ctx, 1, limits.N_CTX_MAX)
        check_range("slots", slots, 1, limits.SLOTS_MAX)
        return self._book.shape_with(model, kv_type, n_ctx, slots)

    def fit_bytes(self, claim: Claim) -> int:
        """How large the claim's pool may be, everything else as claimed; 0: nothing fits.
        Ask ESTIMATE with it, then ``admission.fit_n_ctx``."""
        return self._book.pool_room(claim, self.room_bytes - self._base_bytes)

    def largest_n_ctx(self, claim: Claim, fit_cells: int) -> int:
        """The largest n_ctx with which the claim's agent leaves its pool within ``fit_cells``,
        the other members taken into account; 0: none."""
        return self._book.largest_n_ctx(claim, fit_cells)

    def _check_new(self, agent: AgentKey) -> None:
        if agent in self._entries:
            raise AlreadyExists(
                "agent_in_ledger",
                f"{agent} is in the ledger of {self.device} already; release it first",
            )

    # --- views ------------------------------------------------------------------------------

    def __contains__(self, agent: AgentKey) -> bool:
        """Whether the agent is reserved or committed here."""
        return agent in self._entries

    def __len__(self) -> int:
        """Agents here, reserved or committed."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """A ledger is something, also while it is empty."""
        return True

    def agents(self) -> Iterator[AgentKey]:
        """Everybody here, reserved or committed, in order of arrival."""
        return iter(self._entries)

    def claim_of(self, agent: AgentKey) -> Claim | None:
        """The agent's claim; None if it is not here."""
        entry = self._entries.get(agent)
        return entry.claim if entry else None

    def pool(self, model: str, kv_type: KVType) -> PoolView | None:
        """A pool's shape and size now; None if nobody uses it."""
        pool = self._book.pool(pool_key(model, kv_type))
        if pool is None:
            return None
        return PoolView(model, kv_type, pool.shape, pool.bytes, pool.agents, pool.unmeasured)

    def weights_bytes(self, model: str) -> int | None:
        """What is promised for the model's weights; None if nobody uses it here."""
        entry = self._book.model(model)
        return entry.weights.bytes if entry else None

    def scratch_bytes(self, model: str) -> int:
        """What is promised for the model's scratch; 0 if nobody uses it here."""
        entry = self._book.model(model)
        return entry.scratch.bytes if entry else 0

    def leases(self) -> list[Lease]:
        """All leases, the one that ends first in front."""
        return self._leases.by_end()

    def is_unmeasured(self, agent: AgentKey) -> bool:
        """Whether the agent's weights or pool are still an estimate."""
        entry = self._entries[agent]
        model, pool = self._book.model(entry.claim.model), self._book.pool(entry.claim.pool)
        assert model
        assert pool
        return not model.weights.measured or pool.unmeasured

    def lines(self) -> tuple[Line, ...]:
        """The promised lines: base, weights, scratch, pools, leases. What takes turns counts
        once (the largest): the sum of the lines is not the promise."""
        base = (Line("base", self._base_bytes),) if self._base_bytes else ()
        return (*base, *self._book.lines(), *self._leases.lines())

    def host_lines(self) -> tuple[Line, ...]:
        """The host ledger's lines: ``state:<agent>``, ``spare``, ``pinned:<model>``."""
        return self._host.lines()

    def totals(self) -> Totals:
        """All sums."""
        return Totals.of(self, self._disk_used_bytes, len(self._open))

    def validate_state(self) -> None:
        """Recount everything. O(agents).

        Raises:
            AssertionError: a sum is wrong: our bug.
        """
        self._book.validate_state()
        self._host.validate_state()
        self._leases.validate_state()
        models = Counter(entry.claim.model for entry in self._entries.values())
        for model, agents in models.items():
            book = self._book.model(model)
            assert book
            assert book.agents == agents
        opened = {a: e.reservation for a, e in self._entries.items() if e.reservation}
        assert self._open == {res.id: agent for agent, res in opened.items()}
        states = sum(entry.claim.state_bytes for entry in self._entries.values())
        assert states <= self._host.total_bytes
