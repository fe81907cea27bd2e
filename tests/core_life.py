"""Random lives of a worker: whatever happens, every answer is the undisturbed model's. They are
run by ``test_core_stateful`` and ``test_core_pinned``.

The fake model's next token is a hash of what its cache holds, so an answer can only be right if
every park, resume, rollback, re-prefill and adoption was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from core_driver import GREEDY, MS, Attempt, Driver, LanesKind, key
from fake_engine import EOG, ModelSpec, reference
from fake_store import MemoryStore
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from vram_conductor.protocol.commands import Failed, RunDone
from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.values import KVType, Message, PoolShape, Sampling
from vram_conductor.worker.seating import MOST_REFUSALS
from vram_conductor.worker.streams import Joining

MODELS = [
    ModelSpec("full", weights_bytes=100),
    ModelSpec("window", weights_bytes=150, rollback="window"),
    ModelSpec("chain", weights_bytes=120, rollback="none"),
]
LINGERS = {"f1": 0, "f2": 3, "w1": 2, "c1": None, "c2": 1}
"""``linger_s`` of some agents; others have none."""

AGENTS = {
    "f1": ("full", 150, 1),
    "f2": ("full", 80, 2),
    "w1": ("window", 120, 2),
    "w2": ("window", 120, 2),
    "c1": ("chain", 90, 1),
    "c2": ("chain", 150, 1),
}
SMALLEST = 150 + MODELS[1].pool_bytes(PoolShape(240, 2))
"""The least budget in which every agent's job can run."""

WARM = Sampling(temperature=0.9, repeat_penalty=1.2, penalty_last_n=6, seed=5)
FINE = {"empty_prompt", "prompt_too_long", "worker_lost", "timeout"}

LATE = ("late", "free")
"""Lanes on which something may be under way between two steps."""

agents = st.sampled_from(sorted(AGENTS))
names = st.sampled_from(["main", "side"])
texts = st.text(alphabet="abcd é", max_size=24)


class Life(RuleBasedStateMachine):
    """One worker with a store that outlives it.

    Attributes:
        models: what its agents use.
        sleepable: its models and pools can sleep.
        fine: what jobs may fail with.
        lanes: how its core carries things out.
        joining: how tokens share messages.
        second: type of the KV of every second agent: one model may have two pools.
    """

    models: Sequence[ModelSpec] = MODELS
    sleepable = False
    fine = FINE
    lanes: LanesKind = "inline"
    joining = Joining()
    second: KVType = "f16"

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: set[int] = set()
        self.epoch = 1

    @initialize(
        budget=st.integers(SMALLEST, 1200),
        store=st.sampled_from([0, 300, 1 << 30]),
        slice_ms=st.sampled_from([1, 30, 2000]),
        batch=st.sampled_from([3, 16]),
        seed=st.integers(0, 1 << 16),
    )
    def begin(self, budget: int, store: int, slice_ms: int, batch: int, seed: int) -> None:
        self.driver = Driver(
            self.models,
            budget_bytes=budget,
            store=MemoryStore(store),
            slice_ms=slice_ms,
            batch_tokens=batch,
            sleepable=self.sleepable,
            lanes=self.lanes,
            joining=self.joining,
            seed=seed,
        )
        for agent in sorted(AGENTS)[: 2 + budget % 5]:
            self._load(agent)

    # --- rules --------------------------------------------------------------------------------

    @rule(
        who=st.integers(0, 11),
        text=texts,
        mode=st.integers(0, 5),
        steps=st.sampled_from([0, 0, 1, 5, 200]),
        max_tokens=st.sampled_from([1, 2, 10, 40, None]),
        sampling=st.sampled_from([GREEDY, WARM]),
        cut=st.integers(0, 200),
        full=st.booleans(),
    )
    def run(
        self,
        who: int,
        text: str,
        mode: int,
        steps: int,
        max_tokens: int | None,
        sampling: Sampling,
        cut: int,
        full: bool,
    ) -> None:
        driver = self.driver
        loaded = sorted(driver.agents)
        if not loaded:
            return
        name = "main" if who < 8 else "side"
        conversation = f"{loaded[who % len(loaded)].agent}/{name}"
        if self._busy(conversation):
            return
        fields: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling}
        record = driver.records.get(key(conversation))
        ids = record.ids if record else []
        match mode:
            case 0:
                fields |= {"prompt": text, "continue_": True}
            case 1:
                fields |= {"messages": [Message("user", text)], "continue_": True}
            case 2:
                fields |= {"prompt": text + "x"}
            case 3:
                fields |= {"messages": [Message("user", text)]}
            case 4:
                fields |= {"tokens": [*ids[: cut % (len(ids) + 1)], 97, 98]}
            case _:
                fields |= {"tokens": list(ids) or [97]}
        driver.run(conversation, full=full, **fields)
        self.step(steps)

    @rule(steps=st.integers(1, 30))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()
            assert not self.driver.device.violations

    @rule(ms=st.sampled_from([500, 1_500, 4_000]))
    def time(self, ms: int) -> None:
        """Weights that nobody uses leave when their time has come, and no others do."""
        self.driver.device.spend(ms)
        # Whose job ends in this step is used until its end, and leaves in a later one.
        worked = self._at_work()
        self.driver.step()
        self._lingering(worked)

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        open_ops = [op for op, item in self.driver.attempts.items() if not item.end]
        if open_ops:
            op = open_ops[which % len(open_ops)]
            self.cancelled.add(op)
            self.driver.cancel(op)
            assert self.driver.attempts[op].end or self.lanes in LATE

    @rule(budget=st.integers(0, 1200))
    def budget(self, budget: int) -> None:
        self.driver.budget(budget)

    @rule(
        what=st.sampled_from(
            ["corrupt", "get", "set", "load", "load", "unload", "forget", "fork", "crash", "broker"]
        ),
        agent=agents,
        name=names,
    )
    def disturb(self, what: str, agent: str, name: str) -> None:
        """The rarer events, one rule together, so that most of a life is work."""
        where = key(f"{agent}/{name}")
        match what:
            case "corrupt":
                self.driver.store.corrupt.add(where)
            case "get" | "set":
                self._break_once(what)
            case "load":
                self._load(agent)
            case "unload":
                self._cancels(lambda attempt: attempt.key.agent == agent)
                self.driver.unload(agent)
            case "forget":
                self._cancels(lambda attempt: attempt.key == where)
                self.driver.forget(f"{agent}/{name}")
            case "fork":
                self._fork(agent, name)
            case "crash":
                self.driver.restart_worker()
            case _:
                self._new_broker()

    # --- events -------------------------------------------------------------------------------

    def _load(self, agent: str) -> None:
        model, n_ctx, slots = AGENTS[agent]
        kv_type = self.second if agent.endswith("2") else "f16"
        self.driver.load(agent, model, n_ctx, slots, kv_type, linger_s=LINGERS.get(agent))

    def _fork(self, agent: str, name: str) -> None:
        """As the broker does: onto a name that has nothing, of what is known of the other."""
        driver = self.driver
        other = f"{agent}/side" if name == "main" else agent
        target = f"{agent}/{name}"
        known = key(other).agent_key in driver.agents and key(other) in driver.records
        if not known or self._busy(target):
            return
        driver.forget(target)
        driver.fork(other, target)
        event("a fork")

    def _break_once(self, which: str) -> None:
        faults = self.driver.engine.faults

        def fail() -> None:
            setattr(faults, which, lambda: None)
            raise Internal("state_failed", "once")

        setattr(faults, which, fail)

    def _new_broker(self) -> None:
        driver = self.driver
        driver.attempts = {}
        for record in driver.records.values():
            record.sent_version = None
        self.epoch += 1
        driver.welcome(self.epoch)
        before, driver.agents = driver.agents, {}
        for name, spec in before.items():
            driver.load(
                name.agent, spec.model, spec.n_ctx, spec.slots, linger_s=LINGERS.get(name.agent)
            )

    # --- what must hold -----------------------------------------------------------------------

    @invariant()
    def right(self) -> None:
        if hasattr(self, "driver"):
            self._check_ended()
            assert not self.driver.device.violations
            assert len(self.driver.answers) == len(
                [op for op in self.driver.commands if op in self.driver.answers]
            )

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.budget(1200)
        self.driver.finish(*[op for op, item in self.driver.attempts.items() if not item.end])
        self._check_ended()
        assert not self.driver.device.violations
        for agent in list(self.driver.agents):
            self.driver.unload(agent.agent)
        self.driver.device.spend(1000 * max(one or 0 for one in LINGERS.values()))
        self.driver.step()
        assert not self.driver.core.residency.weights
        assert self.driver.device.allocated_bytes == 0
        assert len(self.driver.core.jobs) == 0

    # --- inside -------------------------------------------------------------------------------

    def _at_work(self) -> set[str]:
        """Models that have jobs."""
        return {job.pool.weights.model for job in self.driver.core.jobs}

    def _lingering(self, worked: set[str]) -> None:
        """Nothing is there that should have left a while ago."""
        core, now_ns = self.driver.core, self.driver.device.now_ns
        if core.hauling:
            return
        busy = self._at_work() | worked
        for model, weights in core.residency.weights.items():
            if model in busy or weights.handle is None or weights.readers:
                continue
            mine = [spec.linger_s for spec in self.driver.agents.values() if spec.model == model]
            longest = None if None in mine else max((one or 0 for one in mine), default=None)
            if longest is not None:
                assert weights.used_ns + longest * 1000 * MS > now_ns
            elif not mine and weights.leaves_ns is not None:
                assert weights.leaves_ns > now_ns

    def _busy(self, conversation: str) -> bool:
        where = key(conversation)
        return any(item.key == where and not item.end for item in self.driver.attempts.values())

    def _cancels(self, which: Callable[[Attempt], bool]) -> None:
        self.cancelled |= {
            op for op, item in self.driver.attempts.items() if not item.end and which(item)
        }

    def _check_ended(self) -> None:
        for op, attempt in list(self.driver.attempts.items()):
            if attempt.end is None:
                continue
            self._check(op, attempt)
            del self.driver.attempts[op]

    def _check(self, op: int, attempt: Attempt) -> None:
        model, n_ctx, _ = AGENTS[attempt.key.agent]
        run, end = attempt.run, attempt.end
        if attempt.ids:
            assert attempt.prompt is not None
            spec = self.driver.specs[model]
            limit = run.max_tokens or 1 << 30
            seed = run.sampling.seed or 0
            right = reference(spec, attempt.prompt, limit, run.sampling, seed, n_ctx)
            assert attempt.ids == right[: len(attempt.ids)]
        if isinstance(end, Failed):
            assert end.error.reason in self.fine, end.error
            return
        assert isinstance(end, RunDone)
        reason = end.usage.stop_reason
        if self.lanes not in LATE or reason == "cancelled":
            # What has to wait for something under way may come too late.
            assert (reason == "cancelled") == (op in self.cancelled)
        if reason == "eos":
            assert attempt.ids[-1] == EOG
        if reason == "length":
            total = len(attempt.prompt or []) + len(attempt.ids)
            assert len(attempt.ids) == run.max_tokens or total == n_ctx


class Sleep(Life):
    """A life in which models and pools can sleep, on a device that others use too: no byte beyond
    the budget, and nothing is left behind.

    Attributes:
        met: refusals of the device itself while a job was under way, by op.
    """

    models = [
        replace(spec, scratch_bytes=size) for spec, size in zip(MODELS, (9, 0, 17), strict=True)
    ]
    sleepable = True
    fine = FINE | {"pool_failed", "load_failed", "wake_failed"}

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[int, int] = {}

    @rule(
        what=st.sampled_from(["wake", "wake", "back_up", "sleep", "broken wake"]),
        times=st.integers(1, 3),
    )
    def refuse(self, what: str, times: int) -> None:
        """The next few calls are refused."""
        faults = self.driver.engine.faults
        which = "wake" if what == "broken wake" else what
        left = times

        def fail() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                setattr(faults, which, lambda: None)
            if what == "wake":
                raise ResourceExhausted("wake_failed", "others have it", retryable=True)
            for op in list(self.driver.attempts):
                self.met[op] = self.met.get(op, 0) + 1
            reason = {"back_up": "backup_failed", "sleep": "sleep_failed"}.get(what, "wake_failed")
            raise Internal(reason, "once")

        setattr(faults, which, fail)

    def _check(self, op: int, attempt: Attempt) -> None:
        super()._check(op, attempt)
        if isinstance(attempt.end, Failed) and attempt.end.error.reason == "wake_failed":
            assert self.met.get(op, 0) > MOST_REFUSALS, "it was to be planned anew"

    @rule(taken=st.integers(0, 300))
    def others(self, taken: int) -> None:
        """A process that nobody knows of takes memory, or gives it back."""
        device = self.driver.device
        device.capacity_bytes = max(self.driver.budget_bytes, device.allocated_bytes)
        device.foreign_bytes = min(taken, device.capacity_bytes - device.allocated_bytes)

    @invariant()
    def pinned(self) -> None:
        """Backups lie in what the store lends, and none is forgotten."""
        if hasattr(self, "driver") and not self.driver.core.hauling:
            driver = self.driver
            lent = sum(item.lent_bytes for item in driver.core.residency.weights.values())
            assert driver.store.lent_bytes == lent == driver.device.pinned_bytes
            if driver.core.progress()[1]:
                return  # A lane may take it this very moment.
            # What is counted for a live context is taken when it first computes.
            pools: list[Any] = [pool.handle for pool in driver.core.residency.pools.values()]
            fresh = [pool for pool in pools if pool and not pool.scratch]
            later = sum(pool.model.spec.scratch_bytes for pool in fresh)
            taken = driver.device.allocated_bytes + later
            assert taken == driver.core.residency.resident_bytes()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            driver = self.driver
            for kind in driver.core.residency.rates.report():
                event(kind)
            driver.device.capacity_bytes, driver.device.foreign_bytes = 1 << 60, 0
            for which in ("wake", "back_up", "sleep"):
                setattr(driver.engine.faults, which, lambda: None)
        super().teardown()
        if hasattr(self, "driver"):
            assert self.driver.device.pinned_bytes == 0
            assert self.driver.store.lent_bytes == 0
