"""Several GPUs in one configuration: a ledger each, what others use of each, scratch and base."""

from __future__ import annotations

from typing import Any

from scripted_worker import MIB, MODELS, Bench, Client, ScriptedWorker, config_of, shape_of

from vram_conductor.protocol import commands as c
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.status import DeviceStatus
from vram_conductor.protocol.values import Line, Memory

SMALL = MODELS["small"]
NEED = SMALL.weights_bytes + SMALL.pool_bytes(1024)
BASE = 20 * MIB
SCRATCH = 12 * MIB


class ScratchWorker(ScriptedWorker):
    """One that tells what live contexts take beyond their buffers."""

    def reply(self, command: Any, kind: Any, raw: Any = (), **fields: Any) -> None:
        if kind is c.Estimated:
            fields["scratch_bytes"] = SCRATCH
        super().reply(command, kind, raw, **fields)


def gpus(
    count: int = 3, total: int = 400, **ready: Any
) -> tuple[Bench, list[ScratchWorker], Client]:
    devices = [DeviceConfig(id=f"cuda:{at}", kind="cuda") for at in range(count)]
    bench = Bench(config_of(*devices))
    workers: list[ScratchWorker] = []
    for at, device in enumerate(devices):
        worker = ScratchWorker(
            bench, device.id, epoch=at + 1, kind="cuda", total_bytes=total * MIB, base_bytes=BASE
        )
        bench.workers[worker.peer] = worker
        worker.ready(**ready)
        workers.append(worker)
    return bench, workers, bench.client()


def status(bench: Bench, at: int) -> DeviceStatus:
    return bench.core.report(bench.now_ns).devices[at]


def others_take(worker: ScriptedWorker, size: int) -> None:
    memory = Memory(used_bytes=size, own_bytes=0, foreign_bytes=size)
    worker.residency(memory=memory, lines=[Line("base", BASE)])


def test_one_full_gpu_is_merely_full_while_two_idle() -> None:
    """Probing the full one allocates nothing there: it is asked for an estimate only."""
    bench, workers, client = gpus()
    others_take(workers[0], 380 * MIB)
    for at in range(2):
        body = client.ok(client.register(f"a{at}", "small" if at else "other"))
        assert body["device"] in ("cuda:1", "cuda:2")
    assert not workers[0].all(c.Load)
    assert workers[0].all(c.Estimate)
    assert status(bench, 0).promised.promised_bytes == BASE


def test_a_named_full_gpu_refuses_with_what_others_use() -> None:
    _, workers, client = gpus()
    others_take(workers[0], 380 * MIB)
    error = client.error(client.register("a", device="cuda:0"))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, LEDGER_DENY)
    assert error.details["foreign_bytes"] == 380 * MIB
    assert not workers[0].all(c.Load)
    others_take(workers[0], 0)
    assert client.ok(client.register("a", device="cuda:0"))["device"] == "cuda:0"


def test_all_full_is_refused_with_every_gpu() -> None:
    _, workers, client = gpus()
    for worker in workers:
        others_take(worker, 380 * MIB)
    error = client.error(client.register("a"))
    listed = {item["device"] for item in error.details["devices"]}
    assert listed == {"cuda:0", "cuda:1", "cuda:2"}


def test_the_workers_own_context_and_scratch_count_before_anything_is_loaded() -> None:
    """With a byte less than base, weights, pool and scratch the agent is refused."""
    exact = BASE + NEED + SCRATCH
    for missing, fits in ((0, True), (1, False)):
        bench, workers, client = gpus(1)
        others_take(workers[0], 400 * MIB - exact + missing)
        rid = client.register("a")
        if not fits:
            assert client.error(rid).details["short_by_bytes"] == 1
            assert not workers[0].all(c.Load)
            continue
        client.ok(rid)
        assert workers[0].all(c.Load)[0].scratch_bytes == SCRATCH
        lines = {line.key: line.bytes for line in status(bench, 0).promised.lines}
        assert lines["base"] == BASE
        assert lines["scratch:m-small@f16"] == SCRATCH
        assert status(bench, 0).promised.promised_bytes == exact


def test_a_claim_becomes_what_was_measured() -> None:
    """An embedder that claimed most of the card, and takes a tenth."""
    bench, workers, client = gpus(1)
    worker = workers[0]
    worker.loaded_sizes = {"weights_bytes": 30 * MIB, "pool_bytes": 10 * MIB}
    client.ok(client.register("embedder"))
    assert status(bench, 0).promised.promised_bytes == BASE + 40 * MIB + SCRATCH
    worker.residency(
        lines=[
            Line("base", BASE + 2 * MIB),
            Line("weights:m-small", 30 * MIB),
            Line("pool:m-small@f16", 10 * MIB, shape=shape_of(1024)),
            Line("scratch:m-small@f16", 10 * MIB),
        ]
    )
    assert status(bench, 0).promised.promised_bytes == BASE + 52 * MIB


def test_a_gpu_whose_sample_is_old_admits_nothing_until_there_is_a_new_one() -> None:
    old = Memory(used_bytes=0, own_bytes=0, foreign_bytes=0, age_ms=60_000)
    _, workers, client = gpus(2, memory=old)
    error = client.error(client.register("a"))
    assert error.reason == LEDGER_DENY
    assert {item["code"] for item in error.details["devices"]} == {"STALE_SAMPLE"}
    others_take(workers[1], 0)
    assert client.ok(client.register("b"))["device"] == "cuda:1"
