"""Switching between two models: room for one of them, and with the KV brought ahead of time."""

from __future__ import annotations

from vram_conductor.client.bench_bed import Bed, open_bed
from vram_conductor.client.bench_setting import BenchModel
from vram_conductor.client.bench_sizes import register
from vram_conductor.client.bench_switch_scene import BESIDE, Switching
from vram_conductor.client.bench_switch_wakes import moves
from vram_conductor.client.bench_turns import THINK_S, Pair, alternate, fill, short_turn, warm_up
from vram_conductor.protocol.values import MoveRate

FACTOR, CONSTANT_MS = 1.15, 3.0
"""A switch may take 1.15 times what the copies take at the reference rate, and 3 ms."""

PREFETCHED_MS = 5.0
PREFETCH_S = 2.0
"""So long is waited for KV that should come early."""


def turns(switching: Switching) -> None:
    """Room for one of two models: time to first token, then the moves as the worker sees them."""
    names = [switching.small.name, switching.large.name]
    capacity = switching.one.capacity([[name] for name in names])
    with open_bed(switching.setting, "timeshare", capacity) as bed:
        switching.note_mechanism(bed)
        register(bed, switching.cast_one()[:2])
        for agent in ("a", "b"):
            fill(bed, agent, switching.tokens)
        warm_up(bed, ("a", "b"))
        switching.say("switching between two models, room for one")
        pairs = alternate(bed, ("a", "b"), switching.setting.number(cuda=25, cpu=2))
        for agent, model in (("a", switching.small), ("b", switching.large)):
            _switch_row(switching, bed, agent, model, pairs[agent])
        switching.report.data["timeshare"] = {agent: pairs[agent].plain() for agent in pairs}
        moves(switching, bed)


def _switch_row(switching: Switching, bed: Bed, agent: str, model: BenchModel, pair: Pair) -> None:
    kv_bytes, weights = bed.kv_bytes(agent), switching.one.models[model.name].weights
    copied_ms = (weights + kv_bytes) / switching.reference["h2d_gb_s"] / 1e6
    switching.add(
        f"switch_{agent}",
        f"switch to {model.name}, {pair.tokens:.0f} tokens: first token over a resident agent's",
        pair.extra_ms,
        "ms",
        wanted=switching.wanted(FACTOR * copied_ms + CONSTANT_MS),
        note=f"{(weights + kv_bytes) >> 20} MiB take {copied_ms:.1f} ms at the reference rate; "
        f"its moves {pair.moved_ms:.1f} ms, p95 {pair.p95_ms:.1f}, "
        f"resident {pair.resident_ms:.1f} ms, {pair.computed_ms:.1f} of it computing",
    )


def prefetched(switching: Switching) -> None:
    """Two agents of one model that just woke: the second one's KV came while nobody waited."""
    names = [switching.small.name, switching.large.name]
    capacity = switching.two.capacity([[name] for name in names])
    with open_bed(switching.setting, "timeshare", capacity, worker=BESIDE) as bed:
        register(bed, switching.cast_two())
        for agent in ("a1", "a2", "b"):
            fill(bed, agent, switching.tokens)
        warm_up(bed, ("a1", "b"))
        switching.say("switching to an agent whose KV was prefetched")
        rounds = switching.setting.number(cuda=20, cpu=2)
        pair = Pair()
        for index in range(rounds):
            _prefetch_round(bed, pair, index)
    found = bool(pair.switched)
    if found:
        switching.report.data["prefetched"] = pair.plain()
    switching.add(
        "prefetched",
        f"switch to another agent of {switching.small.name}, weights resident, KV prefetched: "
        "first token over a resident agent's",
        pair.extra_ms if found else None,
        "ms",
        wanted=switching.wanted(PREFETCHED_MS),
        note=f"its KV had come early in {len(pair.switched)} of {rounds} rounds; "
        f"p95 {pair.p95_ms:.1f}, resident {pair.resident_ms:.1f} ms"
        if found
        else f"its KV came early in none of {rounds} rounds",
    )


def _prefetch_round(bed: Bed, pair: Pair, index: int) -> None:
    """``b`` takes the device, ``a1`` takes it back; ``a2`` is measured if its KV has come since,
    as the worker's own count says, and if nothing was left to move in its turn."""
    short_turn(bed, "b", index)
    before = bed.rates().get("state_in", MoveRate()).count
    own = short_turn(bed, "a1", index).usage.swap.restored
    early = bed.moved("state_in", before + own, PREFETCH_S) is not None
    switched = short_turn(bed, "a2", index)
    bed.pause(THINK_S)
    resident = short_turn(bed, "a2", index)
    if early and not switched.usage.swap.bytes:
        pair.switched.append(switched)
        pair.resident.append(resident)
