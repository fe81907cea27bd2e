"""What is counted, without a socket; the page itself is tested with the process."""

from __future__ import annotations

from vram_conductor.broker.effects import Effect, SendClient
from vram_conductor.broker.events import Event, Tick, WorkerMessageIn
from vram_conductor.broker.shell.metrics import SNAPSHOT_NS, Shell, Tally
from vram_conductor.protocol.commands import Ready, RunDone, RunTokens
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.messages import Error, Pong
from vram_conductor.protocol.status import DeviceStatus, LeaseStatus, LedgerStatus, StatusReport
from vram_conductor.protocol.values import DeviceInfo, Memory, Usage

REPORT = StatusReport(
    broker_epoch=1,
    queued=3,
    jobs_done=5,
    devices=[
        DeviceStatus(
            device="cpu",
            kind="cpu",
            promised=LedgerStatus(cap_bytes=100, promised_bytes=60),
            host=LedgerStatus(cap_bytes=50),
            resident_bytes=40,
            memory=Memory(used_bytes=45, own_bytes=40, foreign_bytes=5),
            swaps=9,
            leases=[
                LeaseStatus(
                    principal=principal,
                    name="train",
                    device="cpu",
                    bytes=size,
                    state="held",
                    ttl_s=60,
                )
                for principal, size in (("local", 7), ("other", 8))
            ],
        )
    ],
)


class Fed:
    """A tally with a clock of its own."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.reports = 0
        self.tally = Tally(self._report, lambda: Shell(journal_waiting=2), lambda: self.now_ns)

    def _report(self) -> StatusReport:
        self.reports += 1
        return REPORT

    def feed(self, event: Event, *effects: Effect) -> None:
        self.tally.observe(event, list(effects))

    def value(self, name: str, **labels: str) -> float | None:
        found = [s.value for s in self.tally.samples() if s.name == name and s.labels == labels]
        assert len(found) <= 1
        return found[0] if found else None


def from_worker(message: object) -> WorkerMessageIn:
    return WorkerMessageIn(b"w", message, [])  # type: ignore[arg-type]


def ready(epoch: int) -> WorkerMessageIn:
    return from_worker(
        Ready(
            v=(1, 0),
            worker="w",
            worker_epoch=epoch,
            pid=1,
            host="h",
            version="",
            build="",
            device=DeviceInfo(device="cpu", kind="cpu", name="", total_bytes=1),
            memory=Memory(used_bytes=0, own_bytes=0, foreign_bytes=0),
        )
    )


def test_tokens_are_counted_by_what_became_of_them() -> None:
    fed = Fed()
    head = {"broker_epoch": 1, "op": 1, "worker_epoch": 1, "job": 1}
    fed.feed(from_worker(RunTokens(**head, text="a", ids=[1, 2])))
    fed.feed(from_worker(RunTokens(**head, text="", ids=[3])))
    usage = Usage(prompt_tokens=10, reused_tokens=7, reprefilled_tokens=1)
    fed.feed(from_worker(RunDone(**head, usage=usage)))  # type: ignore[arg-type]
    assert fed.value("tokens", kind="generated") == 3
    assert fed.value("tokens", kind="prompt") == 10
    assert fed.value("tokens", kind="reused") == 7
    assert fed.value("tokens", kind="reprefilled") == 1


def test_refusals_are_counted_by_code() -> None:
    fed = Fed()
    deny = ErrorInfo(Code.RESOURCE_EXHAUSTED, "VRAM_LEDGER_DENY", "no", details={"code": "CAP"})
    other = ErrorInfo(Code.NOT_FOUND, "unknown_agent", "no")
    for error in (deny, other, deny):
        fed.feed(Tick(), SendClient(b"c", Error(rid=b"", error=error)), SendClient(b"c", Pong()))
    assert fed.value("denies", code="CAP") == 2
    assert fed.value("errors", code="NOT_FOUND", reason="unknown_agent") == 1
    assert fed.value("errors", code="RESOURCE_EXHAUSTED", reason="VRAM_LEDGER_DENY") == 2


def test_a_worker_that_repeats_ready_started_once() -> None:
    fed = Fed()
    for epoch in (1, 1, 2, 2, 3):
        fed.feed(ready(epoch))
    assert fed.value("worker_starts", device="cpu") == 3


def test_gauges_come_from_one_report_a_second() -> None:
    fed = Fed()
    assert fed.value("queued_jobs") is None
    for _ in range(100):
        fed.feed(Tick())
    assert fed.reports == 1
    fed.now_ns += SNAPSHOT_NS
    fed.feed(Tick())
    assert fed.reports == 2
    assert fed.value("queued_jobs") == 3
    assert fed.value("jobs", result="done") == 5
    assert fed.value("journal_waiting_records") == 2
    assert fed.value("bytes", device="cpu", what="promised") == 60
    assert fed.value("bytes", device="cpu", what="foreign") == 5
    assert fed.value("bytes", device="cpu", what="host_cap") == 50
    assert fed.value("worker_up", device="cpu") == 0
    assert fed.value("swaps", device="cpu") == 9


def test_leases_are_gauges() -> None:
    fed = Fed()
    fed.feed(Tick())
    assert fed.value("bytes", device="cpu", what="leases") == 15
    assert fed.value("leases", device="cpu") == 2
