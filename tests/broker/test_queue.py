"""The broker's job queue: bounds, first in first out per conversation, priorities with aging."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.broker.jobs.queue import AGING_NS, JobQueue
from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.protocol.values import AgentKey, ConversationKey


@dataclass(eq=False)
class Item:
    job: int
    key: ConversationKey
    device: str = "cpu"
    priority: int = 0
    received_ns: int = 0
    size_bytes: int = 10


def item(job: int, agent: str = "a", conversation: str = "main", **fields: object) -> Item:
    made = Item(job, ConversationKey("p", agent, conversation))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def everything(_: Item) -> bool:
    return True


def drain(queue: JobQueue[Item], device: str = "cpu", now_ns: int = 0) -> list[int]:
    out: list[int] = []
    while (head := queue.next(device, everything, now_ns)) is not None:
        queue.remove(head)
        out.append(head.job)
    return out


def test_a_conversations_jobs_keep_their_order_whatever_their_priority() -> None:
    queue: JobQueue[Item] = JobQueue(10, 10)
    for job, priority in ((1, 0), (2, 9), (3, 5)):
        queue.push(item(job, priority=priority))
    queue.push(item(4, "b", priority=1))
    assert drain(queue) == [4, 1, 2, 3]


def test_among_heads_priority_then_age_decides() -> None:
    queue: JobQueue[Item] = JobQueue(10, 10)
    queue.push(item(1, "a", received_ns=5))
    queue.push(item(2, "b", received_ns=4))
    queue.push(item(3, "d", priority=1, received_ns=9))
    assert drain(queue, now_ns=10) == [3, 2, 1]


def test_waiting_outweighs_priority_in_the_end() -> None:
    queue: JobQueue[Item] = JobQueue(10, 10)
    queue.push(item(1, "old", priority=0, received_ns=0))
    queue.push(item(2, "new", priority=3, received_ns=2 * AGING_NS))
    assert queue.next("cpu", everything, 2 * AGING_NS).job == 2  # type: ignore[union-attr]
    queue.push(item(3, "newer", priority=3, received_ns=4 * AGING_NS))
    queue.remove(next(waiting for waiting in queue if waiting.job == 2))
    assert queue.next("cpu", everything, 4 * AGING_NS).job == 1  # type: ignore[union-attr]


def test_only_ready_heads_leave_and_each_device_has_its_own() -> None:
    queue: JobQueue[Item] = JobQueue(10, 10)
    queue.push(item(1, "a"))
    queue.push(item(2, "a"))
    queue.push(item(3, "b", device="cuda:0"))
    assert queue.next("cpu", lambda job: job.job != 1, 0) is None
    assert queue.waiting("cpu") == 2
    assert queue.waiting("elsewhere") == 0
    assert drain(queue, "cuda:0") == [3]
    assert drain(queue) == [1, 2]


def test_retry_goes_to_the_front() -> None:
    queue: JobQueue[Item] = JobQueue(1, 1)
    queue.push(item(2))
    queue.push(item(1), front=True)
    assert drain(queue) == [1, 2]


def test_bounds_name_the_limit_and_when_to_come_back() -> None:
    queue: JobQueue[Item] = JobQueue(3, 2)
    queue.push(item(1))
    queue.push(item(2, "a", "side"))
    with pytest.raises(ResourceExhausted, match="agent 'a' has 2") as per_agent:
        queue.check_room(AgentKey("p", "a"), 1, 123)
    assert per_agent.value.retry_after_ms == 123
    queue.check_room(AgentKey("p", "b"), 1, 123)
    queue.push(item(3, "b"))
    with pytest.raises(ResourceExhausted, match="the broker has 3") as total:
        queue.check_room(AgentKey("p", "b"), 1, 5)
    assert total.value.details == {"queued": 3, "limit": 3}


def test_large_prompts_are_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.broker.jobs.queue.QUEUED_BYTES_MAX", 100)
    queue: JobQueue[Item] = JobQueue(10, 10)
    large = item(1, size_bytes=90)
    queue.push(large)
    queue.check_room(AgentKey("p", "b"), 10, 5)
    with pytest.raises(ResourceExhausted, match="90 waiting bytes"):
        queue.check_room(AgentKey("p", "b"), 11, 5)
    queue.remove(large)
    queue.check_room(AgentKey("p", "b"), 100, 5)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=40), st.randoms())
def test_counts_and_orders_hold_in_any_sequence(
    jobs: list[tuple[str, int]], rng: random.Random
) -> None:
    queue: JobQueue[Item] = JobQueue(100, 100)
    waiting: dict[ConversationKey, list[Item]] = defaultdict(list)
    for number, (agent, priority) in enumerate(jobs):
        job = item(number, agent, priority=priority)
        queue.push(job)
        waiting[job.key].append(job)
        if rng.random() < 0.4:
            head = queue.next("cpu", everything, 0)
            assert head is not None
            assert head is waiting[head.key][0]
            queue.remove(head)
            waiting[head.key].pop(0)
        elif rng.random() < 0.2:
            line = rng.choice([line for line in waiting.values() if line])
            queue.remove(line.pop(rng.randrange(len(line))))
        total = sum(len(line) for line in waiting.values())
        assert len(queue) == queue.waiting("cpu") == total == len(list(queue))
        for key, line in waiting.items():
            assert queue.count(key.agent_key) == len(line)
