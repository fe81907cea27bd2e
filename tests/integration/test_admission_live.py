"""Admission on the real path: what is promised, what is really loaded, what a refusal says."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf_models import Spec, make_model
from scene import MIB, PLAIN, SMOL, Scene, model, refusal, some_tokens, until, with_bystander

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import Cancel, Error, Ok, Register
from vram_conductor.protocol.values import Line

HEAVY = [Spec(vocab="bytes", n_embd=256, n_ff=768, seed=seed) for seed in (10, 11, 12)]
"""12 MB of weights each."""

LONG = Spec(vocab="bytes", n_ctx_train=16_384, seed=13)
CAPACITY = 128 * MIB


@pytest.fixture(scope="module")
def box() -> Iterator[Scene]:
    """128 MiB: SmolLM2 and one of the heavy models."""
    with Scene(StageDevice(capacity_bytes=CAPACITY, host_cap_bytes=512 * MIB)) as scene:
        yield with_bystander(scene)


@pytest.fixture
def clean(box: Scene) -> Iterator[Scene]:
    """The box with nobody but the bystander, before and after."""
    with box.tidied():
        yield box


def lines(lines: list[Line], key: str) -> dict[str, int]:
    """Bytes of the lines whose key begins with ``key``."""
    return {line.key: line.bytes for line in lines if line.key.startswith(key)}


def ask(scene: Scene, *requests: Register) -> list[Ok | Error]:
    """All at once, from one client; their answers in the order of the questions."""
    client = scene.raw()
    for request in requests:
        client.send(request)
    answers: dict[bytes, Ok | Error] = {}
    while len(answers) < len(requests):
        message: Any = client.receive()
        if isinstance(message, Ok | Error):
            answers[message.rid] = message
    return [answers[request.rid] for request in requests]


def register(agent: str, spec: Spec) -> Register:
    return Register(rid=new_rid(), agent=agent, model=model(spec), n_ctx=256)


# --- promises ---------------------------------------------------------------------------------


def test_agents_that_come_at_once_are_not_promised_the_same_bytes(clean: Scene) -> None:
    clean.conductor.register("smol", SMOL, n_ctx=512)
    for first in range(3):
        requests = [register(f"h{(first + n) % 3}", HEAVY[(first + n) % 3]) for n in range(3)]
        with clean.undisturbed():
            answers = ask(clean, *requests)
            admitted = [answer for answer in answers if isinstance(answer, Ok)]
            refused = [answer.error for answer in answers if isinstance(answer, Error)]
            assert (len(admitted), len(refused)) == (1, 2)
            for error in refused:
                assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, LEDGER_DENY)
                numbers = error.details
                assert numbers["code"] == "CAP"
                assert numbers["ledger_max_bytes"] == CAPACITY
                assert numbers["ledger_allocated_bytes"] + numbers["requested_bytes"] > CAPACITY
            device = clean.device()
            assert device.promised.promised_bytes <= CAPACITY
            assert device.resident_bytes <= CAPACITY
            clean.conductor.unregister(admitted[0].body["agent"])


def test_the_requested_context_counts_not_the_one_of_the_training(clean: Scene) -> None:
    with clean.undisturbed():
        error = refusal(lambda: clean.conductor.register("smol", SMOL, n_ctx=8192))
        assert error.reason == LEDGER_DENY
        largest = error.details["largest_n_ctx_that_fits"]
        assert str(largest) in error.message
    info = clean.conductor.register("smol", SMOL, n_ctx=512).info
    assert info is not None
    pool = lines(clean.device().promised.lines, "pool:")[f"pool:{info.model_id}@f16"]
    clean.conductor.unregister("smol")
    # The hint is exact: so much is admitted, and not one cell more.
    more = clean.conductor.register("smol", SMOL, n_ctx=largest).info
    assert more is not None
    assert more.pool_bytes > 2 * pool
    refusal(lambda: clean.conductor.register("next", model(HEAVY[0]), n_ctx=256))


def test_claims_are_what_was_measured(clean: Scene) -> None:
    clean.conductor.register("smol", SMOL, n_ctx=512)
    clean.conductor.register("q8", SMOL, n_ctx=512, kv_type="q8_0")
    clean.calm_books()
    device = clean.device()
    assert not any(line.unmeasured for line in device.promised.lines)
    assert len(lines(device.promised.lines, "weights:")) == 2, "one per file"
    pools = lines(device.promised.lines, "pool:")
    assert len(pools) == 3
    assert pools == lines(device.resident, "pool:")
    # Nobody claims a share of the device beyond what it uses: the rest is free for others.
    assert device.budget_bytes == CAPACITY
    free = CAPACITY - device.promised.promised_bytes
    assert free > CAPACITY - sum(line.bytes for line in device.promised.lines)


def test_a_file_larger_than_everything_is_refused_at_once(clean: Scene, tmp_path: Path) -> None:
    path = tmp_path / "giant.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 300, 30))
    with path.open("r+b") as file:
        file.truncate(40 << 30)  # sparse
    took: list[float] = []

    def refused_quickly() -> bool:
        begin = time.monotonic()
        error = refusal(lambda: clean.conductor.register("giant", str(path), n_ctx=256))
        took.append(time.monotonic() - begin)
        assert error.reason == LEDGER_DENY
        assert error.details["requested_bytes"] >= 40 << 30
        assert error.details["ledger_max_bytes"] == CAPACITY
        assert error.details["ledger_allocated_bytes"] > 0
        assert not error.details["largest_n_ctx_that_fits"]
        return took[-1] < 0.1

    with clean.undisturbed():
        until(refused_quickly, f"refused within 100 ms; it took {took}")


def test_the_broker_holds_no_device_and_no_model(clean: Scene) -> None:
    process = psutil.Process(clean.broker_pid())
    maps = {Path(item.path).name for item in process.memory_maps()}
    assert not [name for name in maps if "llama" in name or "ggml" in name or "cuda" in name]
    assert not [name for name in maps if name.endswith(".gguf")]
    # What the worker's process takes for itself is a line of the ledger.
    assert "base" in lines(clean.device().resident, "base")


# --- loads that fail --------------------------------------------------------------------------


def test_a_load_that_fails_half_way_leaves_nothing(clean: Scene) -> None:
    # What it needs is known: the dry run's process would be as short of memory.
    clean.conductor.register("smol", SMOL, n_ctx=512)
    clean.conductor.unregister("smol")
    clean.calm_books()
    worker = psutil.Process(clean.worker_pid())
    # An address space that does not hold the model.
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with clean.undisturbed():
        tight = worker.memory_info().vms + 8 * MIB
        resource.prlimit(worker.pid, resource.RLIMIT_AS, (tight, resource.RLIM_INFINITY))
        try:
            error = refusal(lambda: clean.conductor.register("smol", SMOL, n_ctx=512))
        finally:
            resource.prlimit(worker.pid, resource.RLIMIT_AS, none)
        assert error.reason in ("load_failed", "pool_failed")
        assert clean.worker_pid() == worker.pid
    clean.conductor.register("smol", SMOL, n_ctx=512)
    assert clean.run("smol", some_tokens(5, 1, 40_000), max_tokens=2).ids


def test_a_request_that_waits_for_a_load_can_be_cancelled(clean: Scene) -> None:
    client = clean.raw()
    with clean.undisturbed():
        for wait_ms in (0, 20, 100, 300):
            rid = new_rid()
            client.send(Register(rid=rid, agent="smol", model=SMOL, n_ctx=512))
            client.socket.poll(0)
            time.sleep(wait_ms / 1000)
            client.send(Cancel(rid=rid))
            # A cancel that came too late is answered for its own rid, after its request was.
            while not isinstance(message := client.receive(), Ok | Error) or message.rid != rid:
                pass
            if isinstance(message, Error):
                assert (message.error.code, message.error.reason) == (Code.CANCELLED, "cancelled")
            else:
                clean.conductor.unregister("smol")
            # The cancelled one holds nothing: others load as ever.
            clean.conductor.register("other", model(HEAVY[0]), n_ctx=256)
            assert clean.run("other", some_tokens(5, 1), max_tokens=2).ids
            clean.conductor.unregister("other")


def test_two_names_of_one_file_are_one_model(clean: Scene, tmp_path: Path) -> None:
    link = tmp_path / "another-name.gguf"
    link.symlink_to(make_model(PLAIN))
    one = clean.conductor.register("one", model(), n_ctx=512, temperature=0)
    two = clean.conductor.register("two", str(link), n_ctx=512, temperature=0)
    assert one.info is not None
    assert two.info is not None
    assert two.info.model_id == one.info.model_id
    clean.calm_books()
    assert len(lines(clean.device().resident, "weights:")) == 1, "the bystander's, too"
    answers = [clean.run(name, some_tokens(9, 9), max_tokens=9).ids for name in ("one", "two")]
    assert answers[0] == answers[1]
    clean.conductor.unregister("one")
    assert clean.agent("two").state == "ready"
    assert clean.run("two", some_tokens(3, 3), max_tokens=3).usage.reprefilled_tokens == 0


def test_different_contexts_on_one_model_reload_nothing(clean: Scene) -> None:
    clean.conductor.register("large", model(LONG), n_ctx=8192, temperature=0)
    before = clean.calm_books()
    clean.conductor.register("unset", model(LONG), temperature=0)
    clean.conductor.register("small", model(LONG), n_ctx=256, temperature=0)
    for number in range(4):
        for name in ("large", "unset", "small"):
            found = clean.run(name, some_tokens(5, number), max_tokens=3)
            moved = found.usage.swap.evicted
            assert not [item for item in moved if item.startswith(("pool:", "weights:"))]
            assert found.usage.reprefilled_tokens == 0
    assert clean.books().resident == before.resident
