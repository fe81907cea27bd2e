"""Prometheus metrics, if ``metrics_port`` is set: counted from events, gauges from the status.

The loop's thread counts into plain ints and replaces one snapshot; the exporter's thread only
reads, so a scrape never waits for the loop and the loop never for a scrape.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vram_conductor.broker.effects import Effect, SendClient
from vram_conductor.broker.events import Event, WorkerMessageIn
from vram_conductor.protocol.commands import Ready, RunDone, RunTokens
from vram_conductor.protocol.errors import LEDGER_DENY, FailedPrecondition, Unavailable
from vram_conductor.protocol.messages import Error
from vram_conductor.protocol.status import DeviceStatus, StatusReport

PREFIX = "vram_conductor_"
SNAPSHOT_NS = 1_000_000_000
ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Shell:
    """What the shell itself knows.

    Attributes:
        journal_waiting: records that wait in memory because the disk does not take them.
        waiting_bytes: messages to peers that are slow to read.
        dropped_peers: peers that were given up because they did not read.
    """

    journal_waiting: int = 0
    journal_bytes: int = 0
    waiting_bytes: int = 0
    dropped_peers: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the exposition: ``name{labels} value``."""

    name: str
    kind: str
    help: str
    labels: dict[str, str]
    value: float


class Tally:
    """Counts what happens; *pure* but for being fed.

    Args:
        report: the core's status, cheap enough for once a second.
        shell: the shell's own numbers.
        clock_ns: monotonic time.
    """

    def __init__(
        self,
        report: Callable[[], StatusReport],
        shell: Callable[[], Shell],
        clock_ns: Callable[[], int],
    ) -> None:
        self._report = report
        self._shell = shell
        self._clock_ns = clock_ns
        self._snapshot_at_ns = 0
        self._snapshot: tuple[StatusReport, Shell] | None = None
        self._tokens: Counter[str] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._denies: Counter[str] = Counter()
        self._worker_starts: Counter[str] = Counter()
        self._epochs: dict[str, int] = {}

    def observe(self, event: Event, effects: list[Effect]) -> None:
        """Take in one event and what came of it."""
        if isinstance(event, WorkerMessageIn):
            self._from_worker(event.message)
        for effect in effects:
            if isinstance(effect, SendClient) and isinstance(effect.message, Error):
                self._refused(effect.message)
        now_ns = self._clock_ns()
        if now_ns >= self._snapshot_at_ns:
            self._snapshot_at_ns = now_ns + SNAPSHOT_NS
            self._snapshot = (self._report(), self._shell())

    def _from_worker(self, message: object) -> None:
        match message:
            case RunTokens(ids=ids):
                self._tokens["generated"] += len(ids)
            case RunDone(usage=usage):
                self._tokens["reused"] += usage.reused_tokens
                self._tokens["reprefilled"] += usage.reprefilled_tokens
                self._tokens["prompt"] += usage.prompt_tokens
            case Ready(device=device, worker_epoch=epoch):
                # READY is repeated after every broker restart; only a new life counts.
                if self._epochs.get(device.device) != epoch:
                    self._epochs[device.device] = epoch
                    self._worker_starts[device.device] += 1
            case _:
                pass

    def _refused(self, message: Error) -> None:
        error = message.error
        self._errors[str(error.code), error.reason] += 1
        if error.reason == LEDGER_DENY:
            self._denies[str(error.details.get("code", ""))] += 1

    def samples(self) -> Iterator[Sample]:
        """Everything as of now; may be called from another thread."""
        for kind, count in list(self._tokens.items()):
            yield Sample(
                "tokens", "counter", "Tokens by what became of them", {"kind": kind}, count
            )
        for (code, reason), count in list(self._errors.items()):
            labels = {"code": code, "reason": reason}
            yield Sample("errors", "counter", "ERROR messages to clients", labels, count)
        for code, count in list(self._denies.items()):
            yield Sample("denies", "counter", "Refusals by the ledger", {"code": code}, count)
        for device, count in list(self._worker_starts.items()):
            labels = {"device": device}
            yield Sample("worker_starts", "counter", "Workers that said READY", labels, count)
        if self._snapshot is not None:
            report, shell = self._snapshot
            yield from _broker(report)
            yield from _shell(shell)
            for status in report.devices:
                yield from _device(status)


def _broker(report: StatusReport) -> Iterator[Sample]:
    for name, count in (("done", report.jobs_done), ("failed", report.jobs_failed)):
        yield Sample("jobs", "counter", "Jobs that ended", {"result": name}, count)
    for name, text, value in (
        ("queued_jobs", "Jobs that wait at the broker", report.queued),
        ("live_jobs", "Jobs that are not over", len(report.jobs)),
        ("sessions", "Connected clients", report.sessions),
        ("agents", "Admitted agents", report.agents_total),
        ("uptime_seconds", "Since the broker's start", report.uptime_ms / 1000),
        ("draining", "1 while the broker is shutting down", report.draining),
    ):
        yield Sample(name, "gauge", text, {}, value)


def _shell(shell: Shell) -> Iterator[Sample]:
    for name, text, value in (
        ("journal_waiting_records", "Records the disk did not take", shell.journal_waiting),
        ("journal_bytes", "Length of the journal", shell.journal_bytes),
        ("waiting_bytes", "Output waiting for slow readers", shell.waiting_bytes),
    ):
        yield Sample(name, "gauge", text, {}, value)
    yield Sample(
        "dropped_peers", "counter", "Peers given up as they did not read", {}, shell.dropped_peers
    )


def _device(status: DeviceStatus) -> Iterator[Sample]:
    labels = {"device": status.device}
    memory = status.memory
    for what, value in (
        ("cap", status.promised.cap_bytes),
        ("promised", status.promised.promised_bytes),
        ("resident", status.resident_bytes),
        ("budget", status.budget_bytes),
        ("leases", sum(lease.bytes for lease in status.leases)),
        ("foreign", memory.foreign_bytes if memory else 0),
        ("used", memory.used_bytes if memory else 0),
        ("host_cap", status.host.cap_bytes),
        ("host_promised", status.host.promised_bytes),
    ):
        yield Sample("bytes", "gauge", "The ledger, by line", {**labels, "what": what}, value)
    count = len(status.leases)
    yield Sample("leases", "gauge", "Leases that are held or pending", labels, count)
    yield Sample("swaps", "counter", "Moves of KV since the worker's start", labels, status.swaps)
    up = status.worker is not None
    yield Sample("worker_up", "gauge", "1 while the device has a worker", labels, up)


class _Collector:
    """What prometheus-client asks at every scrape."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for sample in self._samples():
            family = families.get(sample.name)
            if family is None:
                make = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                family = make(PREFIX + sample.name, sample.help, labels=list(sample.labels))
                families[sample.name] = family
            family.add_metric(list(sample.labels.values()), float(sample.value))
        yield from families.values()


def serve(port: int, samples: Callable[[], Iterable[Sample]]) -> Callable[[], None]:
    """Serve ``/metrics`` on the loopback address, on a thread of its own.

    Returns:
        Stops serving.

    Raises:
        FailedPrecondition: ``metrics_package_missing``, ``endpoint_in_use``.
        Unavailable: ``bind_failed``.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise FailedPrecondition(
            "metrics_package_missing",
            "metrics need a package: pip install prometheus-client, or set broker.metrics_port = 0",
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(samples))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FailedPrecondition(
                "endpoint_in_use",
                f"port {port} for metrics is in use; set another broker.metrics_port, or 0",
                port=port,
            ) from None
        raise Unavailable(
            "bind_failed", f"cannot serve metrics on port {port}: {error.strerror}", port=port
        ) from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
