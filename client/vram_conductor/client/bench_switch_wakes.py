"""What sleeping and waking take, as the worker reports of its own moves."""

from __future__ import annotations

from collections.abc import Sequence

from vram_conductor.client.bench_bed import Bed, open_bed
from vram_conductor.client.bench_report import median
from vram_conductor.client.bench_sizes import register
from vram_conductor.client.bench_switch_scene import Switching
from vram_conductor.client.bench_turns import between, fill, gb_s, short_turn, warm_up
from vram_conductor.protocol.values import MoveRate

WAKE_SHARE = 90.0
SLEEP_MS = 2.0

Row = dict[str, MoveRate]
"""What moved in one turn, by kind."""


def moves(switching: Switching, bed: Bed) -> None:
    """Of ``a`` and ``b`` that take turns: weights alone, in and out."""
    found = _turns(switching, bed)
    switching.report.data["moves"] = _plain(found)
    for agent, model in (("a", switching.small), ("b", switching.large)):
        switching.report.notes.append(f"a switch to {model.name}: {_usual(found[agent])}")
    weights = [rate for row in found["b"] if (rate := gb_s(row.get("wake_weights"))) is not None]
    reference = switching.reference["h2d_gb_s"]
    switching.add(
        "wake_weights",
        f"wake of {switching.large.name}'s weights alone, of the reference rate",
        100 * median(weights) / reference if weights else None,
        "%",
        wanted=switching.wanted(WAKE_SHARE),
        relation=">=",
        note=f"{median(weights):.1f} GB/s" if weights else "the worker reports none",
    )
    # While a wakes, it is the large model that goes to sleep.
    asleep = [row["sleep_weights"].ms for row in found["a"] if "sleep_weights" in row]
    switching.add(
        "sleep_weights",
        f"sleep of {switching.large.name}'s weights",
        median(asleep) if asleep else None,
        "ms",
        wanted=switching.wanted(SLEEP_MS),
        note="" if asleep else "the worker reports none",
    )


def wakes(switching: Switching) -> None:
    """The large model's weights and pool, both asleep: the other one's pool takes their room."""
    names = [switching.small.name, switching.large.name]
    capacity = switching.full.capacity([[name] for name in names])
    with open_bed(switching.setting, "timeshare", capacity) as bed:
        register(bed, switching.cast_full())
        for agent in ("a", "b"):
            fill(bed, agent, switching.tokens)
        warm_up(bed, ("a", "b"))
        switching.say("waking weights and pool together")
        found = _turns(switching, bed)
    switching.report.data["wakes"] = _plain(found)
    rows = [row for row in found["b"] if {"wake", "wake_pool"} <= row.keys()]
    # A pool has no contents that are copied: they are the KV in use, which comes by itself.
    copied = [row["wake"].bytes + row.get("state_in", MoveRate()).bytes for row in rows]
    whole_ms = [row["wake"].ms for row in rows]
    rates = [size / ms / 1e6 for size, ms in zip(copied, whole_ms, strict=True) if ms > 0]
    reference = switching.reference["h2d_gb_s"]
    switching.add(
        "wake",
        f"wake of {switching.large.name}'s weights and pool, with the KV in use: what is copied "
        "over all the time that it takes, of the reference rate",
        100 * median(rates) / reference if rates else None,
        "%",
        wanted=switching.wanted(WAKE_SHARE),
        relation=">=",
        note=f"{median(rates):.1f} GB/s, {median(copied) / (1 << 20):.0f} MiB in "
        f"{median(whole_ms):.1f} ms; a pool of "
        f"{median([row['wake_pool'].bytes for row in rows]) / (1 << 20):.0f} MiB beside it"
        if rates
        else "the worker reports none",
    )


def _turns(switching: Switching, bed: Bed) -> dict[str, list[Row]]:
    """What moved in every turn of ``a`` and ``b``, each of which takes the device over."""
    found: dict[str, list[Row]] = {"a": [], "b": []}
    for index in range(switching.setting.number(cuda=8, cpu=1)):
        for agent, rows in found.items():
            before = bed.rates()
            short_turn(bed, agent, index)
            rows.append(between(before, bed.rates()))
    return found


def _plain(found: dict[str, list[Row]]) -> dict[str, list[dict[str, dict[str, float]]]]:
    """For the JSON."""
    return {
        agent: [
            {kind: {"bytes": rate.bytes, "ms": round(rate.ms, 3)} for kind, rate in row.items()}
            for row in rows
        ]
        for agent, rows in found.items()
    }


def _usual(rows: Sequence[Row]) -> str:
    """The moves of a switch in words: medians by kind."""
    parts: list[str] = []
    for kind in sorted({kind for row in rows for kind in row}):
        found = [row[kind] for row in rows if kind in row]
        ms, size = median([rate.ms for rate in found]), median([rate.bytes for rate in found])
        rate = f", {size / ms / 1e6:.1f} GB/s" if ms > 0 and size else ""
        parts.append(f"{kind} {size / (1 << 20):.0f} MiB in {ms:.2f} ms{rate}")
    return "; ".join(parts) or "the worker reports no moves"
