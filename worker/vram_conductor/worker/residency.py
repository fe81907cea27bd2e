"""Who is where: agents, weights, pools, slots and conversations of one device. *Pure.*

These objects are the worker's only record of what lies on its device. ``moves`` changes them as
it moves things; the planner and the scheduler see frozen views of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_conductor.protocol.values import AgentKey, ConversationKey, KVType, PoolShape
from vram_conductor.worker.engine import Model, Pool, Tokens
from vram_conductor.worker.rates import Rates
from vram_conductor.worker.shortage import Shortage
from vram_conductor.worker.tape import Tape
from vram_conductor.worker.transcript import Transcript

if TYPE_CHECKING:
    from vram_conductor.worker.job import Job


_SMOOTHING = 0.5


@dataclass(frozen=True)
class Agent:
    """An admitted agent.

    Attributes:
        key: its name.
        model: ``ModelInfo.model``.
        kv_type: element type of its KV.
        n_ctx: its guaranteed context, in tokens.
        state_bytes: size of its largest parked state.
        linger_s: its weights leave so long after the last job; None: not for that.
    """

    key: AgentKey
    model: str
    kv_type: KVType
    n_ctx: int
    state_bytes: int
    linger_s: int | None = None

    @property
    def pool(self) -> str:
        """Key of its pool."""
        return pool_key(self.model, self.kv_type)


def pool_key(model: str, kv_type: KVType) -> str:
    """``<model>@<kv_type>``, as in the ledger's lines."""
    return f"{model}@{kv_type}"


@dataclass
class Weights:
    """One GGUF.

    Attributes:
        bytes: the estimate; what was measured once it was loaded.
        handle: the loaded weights, None while they are not loaded.
        asleep: they are loaded, and not on the device.
        scratch_bytes: what each live context takes beyond its buffers: estimated, and measured
            (``scratch_measured``) once one has computed.
        lent_bytes: host memory that is kept for its backup.
        unbackable: a backup was refused; it is not tried again before the next LOAD.
        load_ms: what the last load took.
        readers: preparations that read its vocabulary on another thread: it stays loaded.
        doomed: no agent is left; it goes when the last reader has. leaves_ns: or else at that time.
    """

    model: str
    path: str
    bytes: int
    handle: Model | None = None
    measured: bool = False
    asleep: bool = False
    scratch_bytes: int = 0
    scratch_measured: bool = False
    lent_bytes: int = 0
    unbackable: bool = False
    load_ms: float = 0.0
    used_ns: int = 0
    readers: int = 0
    doomed: bool = False
    leaves_ns: int | None = None

    @property
    def resident(self) -> bool:
        """Whether they are on the device."""
        return self.handle is not None and not self.asleep

    @property
    def backed(self) -> bool:
        """Whether they can sleep, or do."""
        return self.handle is not None and self.handle.backup_bytes > 0


@dataclass
class Slot:
    """One sequence of an open pool.

    Attributes:
        tape: the ids whose KV is in it, in order of position.
        clean: the store holds the same state, so nothing is lost when it is emptied.
        job: the job that runs in it.
    """

    index: int
    tape: Tape = field(default_factory=Tape)
    conversation: Conversation | None = None
    clean: bool = False
    job: Job | None = None
    used_ns: int = 0


@dataclass
class PoolState:
    """A pool, open or not.

    Attributes:
        want: the shape that its agents need.
        want_bytes: size of a pool of that shape: estimated, then measured.
        shape: the shape that is open; it differs from ``want`` until the pool is reopened.
        open_bytes: measured size of what is open: on the device, unless it is ``asleep``.
        stage_ns: since when it has had jobs in its slots, or others that wait for them (start
            of its time slice).
        open_ms: what opening it took last.
        swap_ms: smoothed cost of bringing one of its jobs onto the device.
    """

    key: str
    weights: Weights
    want: PoolShape
    want_bytes: int
    handle: Pool | None = None
    slots: list[Slot] = field(default_factory=list)
    open_bytes: int = 0
    asleep: bool = False
    measured: bool = False
    stage_ns: int | None = None
    used_ns: int = 0
    open_ms: float = 0.0
    swap_ms: float = 0.0

    @property
    def shape(self) -> PoolShape | None:
        return self.handle.shape if self.handle else None

    @property
    def awake(self) -> bool:
        """Whether its buffers are on the device."""
        return self.handle is not None and not self.asleep

    @property
    def covers_want(self) -> bool:
        """Whether what is awake has the cells and slots that its agents need."""
        shape = self.shape if self.awake else None
        return (
            shape is not None and shape.cells >= self.want.cells and shape.slots >= self.want.slots
        )

    def note_swap(self, swap_ms: float) -> None:
        """Smooth a new measurement into ``swap_ms``."""
        known = self.swap_ms or swap_ms
        self.swap_ms = known + _SMOOTHING * (swap_ms - known)

    def guarantee(self, n_ctx: int) -> int:
        """The context that an agent really has here, in tokens."""
        return min(n_ctx, self.want.cells)


@dataclass
class Conversation:
    """A conversation that this worker has heard of.

    Attributes:
        transcript: the record, as far as the broker has sent or accepted it.
        slot: where its KV is, None if it is in no slot.
        pool: the pool of that slot.
        parked_ids: ids of its parked state, where this process parked it; an adopted state is
            known by its hash alone.
        lost: why its KV is gone though it should be there; the next job reports it.
    """

    key: ConversationKey
    transcript: Transcript = field(default_factory=Transcript)
    slot: Slot | None = None
    pool: PoolState | None = None
    parked_ids: Tokens | None = None
    lost: str = ""
    used_ns: int = 0


class Residency:
    """Everything that the worker knows to be somewhere, by key.

    Attributes:
        base_bytes: what counts for the process itself.
        reserve_bytes: the part of it that it has not taken yet, see ``growth``.
        revision: counts changes that a report of what is where would show.
        rates: what moves took.
        shortage: the last time that the device had less than the budget says.
        lingered: how often weights left because nobody had used them for long enough.
    """

    def __init__(self, base_bytes: int, budget_bytes: int) -> None:
        self.base_bytes = base_bytes
        self.reserve_bytes = 0
        self.budget_bytes = budget_bytes
        self.revision = 0
        self.rates = Rates()
        self.shortage: Shortage | None = None
        self.lingered = 0
        self.agents: dict[AgentKey, Agent] = {}
        self._owned: tuple[frozenset[str], frozenset[str]] | None = None
        self.weights: dict[str, Weights] = {}
        self.pools: dict[str, PoolState] = {}
        self.conversations: dict[ConversationKey, Conversation] = {}

    def resident_bytes(self) -> int:
        """Bytes that count as on the device now."""
        total = self.base_bytes
        total += sum(weights.bytes for weights in self.weights.values() if weights.resident)
        live = [pool for pool in self.pools.values() if pool.handle]
        total += sum(pool.weights.scratch_bytes for pool in live)
        return total + sum(pool.open_bytes for pool in live if pool.awake)

    def admit(self, agent: Agent) -> None:
        """Note an agent."""
        self.agents[agent.key] = agent
        self._owned = None

    def dismiss(self, key: AgentKey) -> Agent | None:
        """Forget an agent."""
        self._owned = None
        return self.agents.pop(key, None)

    def owned_models(self) -> frozenset[str]:
        """Models that an agent has been admitted for."""
        return self._find_owned()[0]

    def owned_pools(self) -> frozenset[str]:
        """Keys of the pools that an agent has been admitted for."""
        return self._find_owned()[1]

    def _find_owned(self) -> tuple[frozenset[str], frozenset[str]]:
        # Asked at every plan; there may be thousands of agents.
        if self._owned is None:
            agents = self.agents.values()
            self._owned = (
                frozenset(agent.model for agent in agents),
                frozenset(agent.pool for agent in agents),
            )
        return self._owned

    def conversation(self, key: ConversationKey) -> Conversation:
        """The conversation, new if it was unknown."""
        found = self.conversations.get(key)
        if found is None:
            found = self.conversations[key] = Conversation(key)
        return found

    def of_agent(self, key: AgentKey) -> list[Conversation]:
        """An agent's conversations, least recently used first."""
        own = [item for item in self.conversations.values() if item.key.agent_key == key]
        return sorted(own, key=lambda item: item.used_ns)

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        for key, conversation in self.conversations.items():
            assert key == conversation.key
            assert (conversation.slot is None) == (conversation.pool is None)
            if conversation.slot and conversation.pool:
                assert conversation.slot.conversation is conversation
                assert conversation.slot in conversation.pool.slots
        for pool in self.pools.values():
            assert pool.weights is self.weights[pool.weights.model]
            assert pool.handle is None or pool.weights.handle is not None
            assert pool.handle is not None or not pool.asleep
            assert pool.awake or not any(slot.conversation for slot in pool.slots)
            assert pool.awake or pool.stage_ns is None
            assert pool.weights.resident or not any(slot.job for slot in pool.slots)
            assert len(pool.slots) == (pool.handle.shape.slots if pool.handle else 0)
            for slot in pool.slots:
                if slot.conversation:
                    assert slot.conversation.slot is slot
                else:
                    assert len(slot.tape) == 0
                    assert slot.job is None
                if slot.job:
                    assert slot.job.slot is slot
