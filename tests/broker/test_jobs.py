"""The table of jobs: numbers, rids, and how many finished ones are kept."""

from __future__ import annotations

import pytest

from vram_conductor.broker.jobs.job import Job, JobTable
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.messages import Decode, Done, Error
from vram_conductor.protocol.stream import SendStream
from vram_conductor.protocol.values import ConversationKey, Usage


def add(table: JobTable, *, text: str = "", principal: str = "p", rid: int = 0) -> Job:
    number = table.next_number()
    key = rid or number
    job = Job(
        job=number,
        rid=key.to_bytes(16, "big"),
        principal=principal,
        key=ConversationKey(principal, "a", "main"),
        device="cpu",
        priority=0,
        message=Decode(rid=bytes(16), agent="a", prompt="x"),
        size_bytes=10,
        digest=b"",
        stream=SendStream(),
        peer=None,
        detach=False,
        received_ns=0,
        queue_deadline_ns=None,
        deadline_ns=None,
    )
    if text:
        job.stream.append(text)
    table.add(job)
    return job


def end(table: JobTable, job: Job, *, well: bool = True) -> list[Job]:
    job.state = "ended"
    job.stream.finish()
    if well:
        job.terminal = Done(rid=job.rid, seq=0, usage=Usage())
    else:
        job.terminal = Error(rid=job.rid, error=ErrorInfo(Code.INTERNAL, "x", "x"))
    return table.ended(job)


def test_rids_belong_to_their_principal() -> None:
    table = JobTable()
    mine, other = add(table, rid=5), add(table, rid=5, principal="q")
    assert table.by_rid("p", mine.rid) is mine
    assert table.by_rid("q", mine.rid) is other
    assert table.by_rid("r", mine.rid) is None


def test_numbers_count_the_jobs_of_ones_own_principal() -> None:
    table = JobTable()
    jobs = [add(table, principal=principal) for principal in "pqpqqp"]
    assert [job.number for job in jobs] == [1, 1, 2, 2, 3, 3]
    assert len({job.job for job in jobs}) == 6
    for job in jobs:
        end(table, job)
        table.forget(job)
    assert add(table).number == 4, "a number is not given twice"


def test_live_jobs_and_counts() -> None:
    table = JobTable()
    jobs = [add(table) for _ in range(3)]
    end(table, jobs[0])
    end(table, jobs[1], well=False)
    assert list(table.live()) == [jobs[2]]
    assert (table.done, table.failed, len(table)) == (1, 1, 3)
    table.forget(jobs[0])
    table.forget(jobs[0])
    assert table.by_rid("p", jobs[0].rid) is None
    assert len(table) == 2


def test_oldest_results_go_first_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.broker.jobs.job.RESULTS_MAX", 2)
    table = JobTable()
    jobs = [add(table) for _ in range(4)]
    assert [end(table, job) for job in jobs[:2]] == [[], []]
    victims = end(table, jobs[2])
    assert victims == [jobs[0]]
    table.forget(jobs[0])
    assert end(table, jobs[3]) == [jobs[1]]


def test_oldest_results_go_first_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    table = JobTable()
    jobs = [add(table, text="x" * 1000) for _ in range(3)]
    size = jobs[0].stream.kept_bytes
    monkeypatch.setattr("vram_conductor.broker.jobs.job.RESULTS_BYTES_MAX", 2 * size)
    assert end(table, jobs[0]) == []
    assert end(table, jobs[1]) == []
    victims = end(table, jobs[2])
    assert victims == [jobs[0]]
    for victim in victims:
        table.forget(victim)
    assert end(table, add(table)) == []


@pytest.mark.parametrize("bound", ["RESULTS_MAX", "RESULTS_BYTES_MAX"])
def test_a_flood_of_jobs_costs_only_its_sender_results(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    table = JobTable()
    waiting = [add(table, text="x" * 1000, principal="patient") for _ in range(2)]
    size = 1 if bound == "RESULTS_MAX" else waiting[0].stream.kept_bytes
    monkeypatch.setattr(f"vram_conductor.broker.jobs.job.{bound}", 5 * size)
    for job in waiting:
        assert end(table, job) == []
    flood = [add(table, text="x" * 1000, principal="flood") for _ in range(20)]
    for job in flood:
        for victim in end(table, job):
            assert victim.principal == "flood"
            table.forget(victim)
    assert [table.by_rid("patient", job.rid) for job in waiting] == waiting
    assert [table.find(job.job) for job in flood[-3:]] == flood[-3:]
    assert len(table) == 5
