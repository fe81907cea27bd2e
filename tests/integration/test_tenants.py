"""Two tenants of a broker with keys, and a real worker: what one parks is not the other's loss."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_models import make_model
from keyed_broker import KeyedBroker, until_in
from scene import MIB, NO_END, PLAIN, some_tokens, until
from worker_process import WorkerProcess

from vram_conductor.client import Conductor
from vram_conductor.client.reply import Result

N_CTX = 1024
TOKENS = 12


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[KeyedBroker]:
    process = KeyedBroker(short_tmp)
    with process:
        yield process


@pytest.fixture
def worker(broker: KeyedBroker, tmp_path: Path) -> Iterator[WorkerProcess]:
    """For the device ``cpu`` and no other."""
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(make_model(PLAIN), models / "plain.gguf")
    config = tmp_path / "worker.toml"
    config.write_text(
        f'[worker]\nmodels_dir = "{models}"\n[[device]]\nid = "cpu"\nkind = "cpu"\n'
        f"capacity = {256 * MIB}\nhost_cap = {256 * MIB}\n"
    )
    key = broker.keys.new("gpu1", "worker", devices=("cpu",))
    until_in(broker, broker.keys.new("eye", "observer")).close()
    flags = ["--config", str(config), "--key", str(key)]
    with WorkerProcess(tmp_path / "w", broker.endpoints["workers"], *flags) as process:
        until(lambda: broker.worker_epoch() is not None, "the worker is welcomed")
        yield process


def say(client: Conductor, conversation: str, seed: int) -> Result:
    return client.decode(
        "coder",
        tokens=some_tokens(200, seed),
        max_tokens=TOKENS,
        conversation=conversation,
        continue_=True,
        return_ids=True,
        logit_bias=NO_END,
    ).result()


def parked(client: Conductor) -> dict[str, int]:
    (agent,) = client.list()
    return {each.conversation: each.parked_bytes for each in agent.conversations}


@pytest.mark.usefixtures("worker")
def test_the_same_prompt_of_another_finds_nothing_computed(broker: KeyedBroker) -> None:
    """Whoever could tell how much of a prompt is known already could guess what others say."""
    alice, bob = (until_in(broker, broker.keys.new(name)) for name in ("alice", "bob"))
    for client in (alice, bob):
        client.register("coder", "plain", n_ctx=N_CTX, temperature=0)
    first = say(alice, "main", 1)
    asked = [say(bob, "main", 1), say(bob, "other", 1), say(alice, "other", 1)]
    assert [each.usage.reused_tokens for each in (first, *asked)] == [0] * 4
    assert all(each.ids == first.ids for each in asked)
    # One's own conversation is known, by the same measure.
    assert say(alice, "main", 2).usage.reused_tokens > 200


@pytest.mark.usefixtures("worker")
def test_forks_stay_within_the_quota_and_nothing_that_was_said_is_lost(
    broker: KeyedBroker,
) -> None:
    alice = until_in(broker, broker.keys.new("alice"))
    info = alice.register("coder", "plain", n_ctx=N_CTX, temperature=0).info
    assert info is not None
    most = info.state_bytes
    alice.unregister("coder")
    bob = until_in(broker, broker.keys.new("bob", kv_bytes=most))
    for client in (alice, bob):
        client.register("coder", "plain", n_ctx=N_CTX, temperature=0)
    kept = say(alice, "main", 1)
    say(bob, "main", 1)
    until(lambda: parked(bob).get("main"), "it is parked")
    for number in range(12):
        assert bob.fork("coder", f"copy{number}").tokens == 200 + TOKENS
        until(lambda: sum(parked(bob).values()) <= most, "it is within the limit")
    until(lambda: parked(bob)["copy0"] == 0, "unused for longest")
    left = parked(bob)
    assert len(left) == 13
    assert left["main"] > 0, "it was copied just now"
    assert left["copy11"] > 0
    # What was given up comes back, computed again; the others' is where it was.
    again, hers = say(bob, "copy0", 2), say(alice, "main", 2)
    assert again.usage.reprefill_reason == "kv_quota"
    assert again.usage.reprefilled_tokens >= 200
    assert hers.usage.reprefilled_tokens == 0
    assert again.ids == hers.ids != kept.ids
    assert say(bob, "copy11", 2).ids == hers.ids
