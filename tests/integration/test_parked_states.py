"""Parked conversations whose file is damaged, gone or would not fit: nobody is harmed, and what was
computed again is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from gguf_models import Spec
from scene import MIB, Scene, model, refusal, some_tokens, until

from vram_conductor.client.demo_outside import flip_bytes
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import LEDGER_DENY, Code

SPEC = Spec(vocab="bytes", seed=70, n_ctx_train=16_384)
N_CTX = 1024
HISTORY, MORE = some_tokens(200, 1), some_tokens(3, 2)
HOST_CAP = 16 * MIB


@pytest.fixture(scope="module")
def parked() -> Iterator[Scene]:
    """Two agents that share one slot, so that one of them is always parked."""
    with Scene(StageDevice(capacity_bytes=64 * MIB, host_cap_bytes=HOST_CAP)) as scene:
        for agent in ("victim", "other"):
            scene.conductor.register(agent, model(SPEC), n_ctx=N_CTX)
        yield scene


def delete(scene: Scene) -> None:
    files = scene.arenas("victim")
    assert files
    for path in files:
        path.unlink()


def cut(scene: Scene) -> None:
    for path in scene.arenas("victim"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def flip(scene: Scene) -> None:
    assert flip_bytes(scene.stage.arena_dir, "victim") > 0


@pytest.mark.parametrize("damage", [delete, cut, flip])
def test_a_lost_state_is_computed_again_and_said(
    parked: Scene, damage: Callable[[Scene], None]
) -> None:
    for agent in ("victim", "other"):
        parked.conductor.reset(agent)
    # What the model says when all of it is computed at once: nothing may be left of the damage.
    first = parked.run("victim", HISTORY, conversation="whole", max_tokens=4)
    record = [*HISTORY, *first.ids]
    whole = [*record, *MORE]
    fresh = parked.run("victim", whole, conversation="fresh", max_tokens=8).ids
    for name in ("whole", "fresh"):
        parked.conductor.reset("victim", name)
    undisturbed = [parked.run("other", ids, max_tokens=6) for ids in (HISTORY, MORE)]
    parked.conductor.reset("other")

    assert parked.run("victim", HISTORY, max_tokens=4).ids == first.ids
    assert parked.run("other", HISTORY, max_tokens=6).ids == undisturbed[0].ids
    for agent in ("victim", "other"):
        parked.sealed(agent)
    parked.kill_worker()
    damage(parked)
    until(lambda: parked.agent("victim").state == "ready", "the agents are loaded again")
    found = parked.run("victim", MORE, max_tokens=8)
    assert found.ids == fresh
    usage = found.usage
    assert (usage.swap.restored, usage.reused_tokens) == (False, 0)
    assert usage.reprefilled_tokens == len(record) - 1
    assert usage.reprefill_reason
    # The neighbour's state was neither looked at nor overwritten.
    other = parked.run("other", MORE, max_tokens=6)
    assert other.ids == undisturbed[1].ids
    assert (other.usage.swap.restored, other.usage.reprefilled_tokens) == (True, 0)
    # And the victim has a state again.
    again = parked.run("victim", MORE, max_tokens=2).usage
    assert (again.swap.restored, again.reprefilled_tokens) == (True, 0)


def test_parking_nothing_and_resuming_nothing_are_nothing(parked: Scene) -> None:
    parked.conductor.register("idle", model(SPEC), n_ctx=N_CTX)
    parked.run("victim", HISTORY, conversation="here", max_tokens=2)
    parked.conductor.reset("idle")
    first = parked.run("idle", HISTORY, max_tokens=2).usage
    assert (first.reused_tokens, first.reprefilled_tokens, first.swap.restored) == (0, 0, False)
    usage = parked.run("victim", MORE, conversation="here", max_tokens=2).usage
    assert (usage.swap.restored, usage.reprefilled_tokens) == (True, 0)
    parked.conductor.unregister("idle")


def test_parked_states_are_in_the_host_ledger(parked: Scene) -> None:
    for agent in ("victim", "other"):
        parked.run(agent, HISTORY, continue_=False, max_tokens=4)
    device = until(lambda: parked.device() if parked.device().parked else None, "it is reported")
    assert device is not None
    promised = {line.key: line.bytes for line in device.host.lines}
    assert device.host.cap_bytes == HOST_CAP
    assert sum(promised.values()) == device.host.promised_bytes
    states = {agent.agent: agent.state_bytes for agent in parked.conductor.list()}
    assert device.host.promised_bytes >= sum(states.values()) > 0
    assert 0 < sum(line.bytes for line in device.parked) <= device.host.promised_bytes
    before = parked.books()
    error = refusal(lambda: parked.conductor.register("large", model(SPEC), n_ctx=16_384))
    assert error.code in (Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED)
    assert error.reason == LEDGER_DENY
    assert error.details["code"] == "HOST"
    assert error.details["ledger_max_bytes"] == HOST_CAP
    fits = error.details["largest_n_ctx_that_fits"]
    assert 0 < fits < 16_384
    assert parked.books() == before
    assert parked.conductor.register("large", model(SPEC), n_ctx=fits).info is not None
    parked.conductor.unregister("large")
