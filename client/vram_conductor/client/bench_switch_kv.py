"""Moving KV alone, weights resident: other agent of the same model, 128 MiB, prefetch beside."""

from __future__ import annotations

from vram_conductor.client.bench_bed import Bed, open_bed
from vram_conductor.client.bench_report import median
from vram_conductor.client.bench_sizes import Role, register, roomy_bytes
from vram_conductor.client.bench_switch_beside import Busy, stream_for
from vram_conductor.client.bench_switch_scene import BESIDE, Switching
from vram_conductor.client.bench_switch_turns import PREFETCHED_MS
from vram_conductor.client.bench_turns import alternate, between, fill, gb_s, short_turn
from vram_conductor.protocol.values import MoveRate

KV_BYTES = {"cuda": 128 << 20, "cpu": 1 << 19}
OUT_SHARE, IN_SHARE = 75.0, 50.0
BESIDE_SHARE = 95.0
SPARE_TOKENS = 512
PACE_S = 0.005
PINNED_AFTER = 3
"""What was parked so often is pinned: it comes back at the bus's rate, which is the harder test."""


def kv(switching: Switching) -> None:
    """Two agents share one slot of the large model; the third model streams beside them."""
    large, sizes = switching.large, switching.one.models[switching.large.name]
    per_token = max(1, sizes.state // switching.n_ctx)
    tokens = KV_BYTES[switching.setting.kind] // per_token
    n_ctx = max(switching.n_ctx, tokens + SPARE_TOKENS)
    cast = [Role("x", large, n_ctx), Role("y", large, n_ctx)]
    room = roomy_bytes(switching.setting)
    with open_bed(switching.setting, "reserve", room, worker=BESIDE) as bed:
        register(bed, [*cast, Role("c", switching.third, switching.n_ctx)])
        _same_model(switching, bed)
        _large_states(switching, bed, tokens)
        _prefetch_beside(switching, bed, tokens)


def _same_model(switching: Switching, bed: Bed) -> None:
    for agent in ("x", "y"):
        fill(bed, agent, switching.tokens)
    switching.say("switching between two agents of one model")
    pairs = alternate(bed, ("x", "y"), switching.setting.number(cuda=15, cpu=2))
    pair = pairs["x"]
    switching.report.data["same_model"] = pair.plain()
    switching.add(
        "same_model",
        f"switch to another agent of {switching.large.name}, weights resident, KV put back in "
        "the turn: first token over a resident agent's",
        pair.extra_ms,
        "ms",
        wanted=switching.wanted(PREFETCHED_MS),
        note=f"p95 {pair.p95_ms:.1f}, resident {pair.resident_ms:.1f} ms",
    )


def _large_states(switching: Switching, bed: Bed, tokens: int) -> None:
    """Copy rates of large states; the first ones are not counted: pinning happens behind them."""
    for agent in ("x", "y"):
        fill(bed, agent, tokens)
    switching.say("parking and resuming large states")
    rows: list[dict[str, MoveRate]] = []
    for index in range(switching.setting.number(cuda=10, cpu=2) + 2):
        before = bed.rates()
        for agent in ("x", "y"):
            short_turn(bed, agent, index)
        bed.pause(0.1)
        if index >= 2:
            rows.append(between(before, bed.rates()))
    size = bed.kv_bytes("x") >> 20
    for key, kind, side, share, word in (
        ("park", "state_out", "d2h", OUT_SHARE, "park"),
        ("resume", "state_in", "h2d", IN_SHARE, "resume"),
    ):
        rates = [rate for row in rows if (rate := gb_s(row.get(kind))) is not None]
        reference = switching.reference[f"{side}_gb_s"]
        switching.add(
            key,
            f"{word} {size} MiB of KV, of the reference rate",
            100 * median(rates) / reference if rates else None,
            "%",
            wanted=switching.wanted(share),
            relation=">=",
            note=f"{median(rates):.1f} of {reference:.1f} GB/s" if rates else "none was moved",
        )
    switching.report.data["states"] = [
        {kind: {"bytes": rate.bytes, "ms": round(rate.ms, 3)} for kind, rate in row.items()}
        for row in rows
    ]


def _prefetch_beside(switching: Switching, bed: Bed, tokens: int) -> None:
    """The only slot of the large model is taken and freed again and again: each time the large
    parked state of ``x`` comes back. The control does the same with no such state."""
    setting, n_max = switching.setting, switching.n_ctx - 256
    seconds = 2.0 if setting.on_cuda else 0.2
    switching.say("a third agent beside prefetches")
    alone = stream_for(bed, "c", seconds, n_max).tokens_per_s()
    control: list[float] = []
    fetching: list[float] = []
    came, loops = MoveRate(), 0
    for _ in range(setting.number(cuda=3, cpu=1)):
        for agent in ("x", "y"):
            bed.conductor.reset(agent)
        with Busy(lambda index: _take_and_free(bed, index)):
            control.append(stream_for(bed, "c", seconds, n_max).tokens_per_s())
        fill(bed, "x", tokens)
        for index in range(PINNED_AFTER):
            short_turn(bed, "x", index)
            bed.pause(0.1)
        before = bed.rates()
        with Busy(lambda index: _take_and_free(bed, index)) as busy:
            fetching.append(stream_for(bed, "c", seconds, n_max).tokens_per_s())
        more = between(before, bed.rates()).get("state_in", MoveRate())
        came = MoveRate(
            count=came.count + more.count, bytes=came.bytes + more.bytes, ms=came.ms + more.ms
        )
        loops += busy.count
    switching.report.data["prefetch_beside"] = {
        "alone_tokens_per_s": alone,
        "control_tokens_per_s": control,
        "fetching_tokens_per_s": fetching,
        "prefetches": came.count,
        "prefetched_bytes": came.bytes,
        "prefetching_ms": round(came.ms, 3),
        "loops": loops,
    }
    seen = median(fetching) / median(control) if median(control) else 0.0
    size = came.bytes / came.count / (1 << 20) if came.count else 0.0
    switching.add(
        "prefetch_rate",
        f"rate of {switching.third.name} while another agent's KV is prefetched, over without",
        100 * seen if came.count else None,
        "%",
        wanted=switching.wanted(BESIDE_SHARE),
        relation=">=",
        note=f"{came.count} prefetches of {size:.0f} MiB at {gb_s(came) or 0:.1f} GB/s in {loops} "
        f"rounds; {median(fetching):.0f} of {median(control):.0f} tokens/s, {alone:.0f} alone"
        if came.count
        else f"nothing was prefetched in {loops} rounds",
    )


def _take_and_free(bed: Bed, index: int) -> None:
    bed.turn("y", [1000 + index % 900], max_tokens=1, conversation="short", continue_=False)
    bed.conductor.reset("y", "short")
    bed.pause(PACE_S)
