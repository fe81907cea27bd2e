"""Switching between two models: room for one of them, and with the KV brought ahead of time."""

from __future__ import annotations

from vram_conductor.client.bench_bed import Bed, open_bed
from vram_conductor.client.bench_report import median
from vram_conductor.client.bench_setting import BenchModel
from vram_conductor.client.bench_sizes import register
from vram_conductor.client.bench_switch_scene import Switching
from vram_conductor.client.bench_turns import (
    Pair,
    alternate,
    between,
    fill,
    gb_s,
    short_turn,
    warm_up,
)
from vram_conductor.protocol.values import MoveRate

FACTOR, CONSTANT_MS = 1.15, 3.0
"""A switch may take 1.15 times what the copies take at the reference rate, and 3 ms."""

PREFETCHED_MS = 5.0
WAKE_SHARE = 0.9
SLEEP_MS = 2.0


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
        _moves(switching, bed)


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
        f"resident {pair.resident_ms:.1f} ms",
    )


def _moves(switching: Switching, bed: Bed) -> None:
    """Sleep and wake by model, from what the worker reports of its own moves."""
    found: dict[str, list[dict[str, MoveRate]]] = {"a": [], "b": []}
    for index in range(switching.setting.number(cuda=8, cpu=1)):
        for agent in ("a", "b"):
            before = bed.rates()
            short_turn(bed, agent, index)
            found[agent].append(between(before, bed.rates()))
    switching.report.data["moves"] = {
        agent: [
            {kind: {"bytes": rate.bytes, "ms": round(rate.ms, 3)} for kind, rate in row.items()}
            for row in rows
        ]
        for agent, rows in found.items()
    }
    for agent, model in (("a", switching.small), ("b", switching.large)):
        switching.report.notes.append(f"a switch to {model.name}: {_usual(found[agent])}")
    _wake_rows(switching, found["b"])
    # While b wakes, it is the small model that goes to sleep, and the other way round.
    asleep = [row["sleep_weights"].ms for row in found["a"] if "sleep_weights" in row]
    switching.add(
        "sleep_weights",
        f"sleep of {switching.large.name}'s weights",
        median(asleep) if asleep else None,
        "ms",
        wanted=switching.wanted(SLEEP_MS),
        note="" if asleep else "the worker reports none",
    )


def _usual(rows: list[dict[str, MoveRate]]) -> str:
    """The moves of a switch in words: medians by kind."""
    parts = []
    for kind in sorted({kind for row in rows for kind in row}):
        found = [row[kind] for row in rows if kind in row]
        ms, size = median([rate.ms for rate in found]), median([rate.bytes for rate in found])
        rate = f", {size / ms / 1e6:.1f} GB/s" if ms > 0 and size else ""
        parts.append(f"{kind} {size / (1 << 20):.0f} MiB in {ms:.2f} ms{rate}")
    return "; ".join(parts) or "the worker reports no moves"


def _wake_rows(switching: Switching, rows: list[dict[str, MoveRate]]) -> None:
    name, reference = switching.large.name, switching.reference["h2d_gb_s"]
    kinds = ("wake_weights", "wake_pool")
    whole = [[row[kind] for kind in kinds] for row in rows if set(kinds) <= row.keys()]
    weights = [rate for row in rows if (rate := gb_s(row.get("wake_weights"))) is not None]
    share = [
        100 * sum(r.bytes for r in both) / sum(r.ms for r in both) / 1e6 / reference
        for both in whole
        if sum(r.ms for r in both) > 0
    ]
    ms = median([sum(rate.ms for rate in both) for both in whole]) if whole else 0.0
    switching.add(
        "wake",
        f"wake of {name}'s weights and pool, bytes over both times, of the reference rate",
        median(share) if share else None,
        "%",
        wanted=switching.wanted(100 * WAKE_SHARE),
        relation=">=",
        note=f"{ms:.1f} ms" if share else "the worker reports none",
    )
    switching.add(
        "wake_weights",
        f"wake of {name}'s weights alone, of the reference rate",
        100 * median(weights) / reference if weights else None,
        "%",
        wanted=switching.wanted(100 * WAKE_SHARE),
        relation=">=",
        note=f"{median(weights):.1f} GB/s" if weights else "the worker reports none",
    )


def prefetched(switching: Switching) -> None:
    """Two agents of one model that just woke: the second one's KV came while the first ran."""
    names = [switching.small.name, switching.large.name]
    capacity = switching.two.capacity([[name] for name in names])
    with open_bed(switching.setting, "timeshare", capacity) as bed:
        register(bed, switching.cast_two())
        for agent in ("a1", "a2", "b"):
            fill(bed, agent, switching.tokens)
        warm_up(bed, ("a1", "b"))
        switching.say("switching to an agent whose KV was prefetched")
        pair, moved = _prefetch_rounds(switching, bed)
    switching.report.data["prefetched"] = pair.plain()
    switching.add(
        "prefetched",
        f"switch to another agent of {switching.small.name}, weights resident, KV prefetched: "
        "first token over a resident agent's",
        pair.extra_ms,
        "ms",
        wanted=switching.wanted(PREFETCHED_MS),
        note=f"nothing was left to move in {len(pair.switched) - moved} of {len(pair.switched)} "
        f"turns; p95 {pair.p95_ms:.1f}, resident {pair.resident_ms:.1f} ms",
    )


def _prefetch_rounds(switching: Switching, bed: Bed) -> tuple[Pair, int]:
    """Each round: ``b`` takes the device, ``a1`` takes it back, then ``a2`` is measured."""
    pair = Pair()
    for index in range(switching.setting.number(cuda=20, cpu=2)):
        for agent in ("b", "a1"):
            short_turn(bed, agent, index)
        # The prefetch happens now, with nobody waiting.
        bed.pause(0.05)
        pair.switched.append(short_turn(bed, "a2", index))
        bed.pause(0.02)
        pair.resident.append(short_turn(bed, "a2", index))
    return pair, sum(turn.usage.swap.bytes > 0 for turn in pair.switched)
