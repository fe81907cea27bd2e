"""How long a ledger decision takes, given the estimate.

    python bench/ledger.py [--rounds 2000] [--agents 10000]

Prints JSON: medians and 99th percentiles in µs of one decision (admit and deny) and of a whole
reserve → commit → release, on an almost empty ledger and on one with many agents: on a few
models, and each on a model of its own (the worst case for the lines of a deny). The targets are
100 µs for a decision and 1,000 µs with 10,000 agents; nothing is asserted here.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import median, quantiles

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim, Measured
from vram_conductor.broker.ledger.decisions import Admit, Deny, Reservation
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.protocol.values import AgentKey, LedgerMode, PoolShape

SEED = 20240607
KIB, MIB = 1 << 10, 1 << 20
CAP = 1 << 60


def pool_bytes(shape: PoolShape) -> int:
    """A made-up estimate that grows with the shape."""
    return shape.cells * 24 * KIB + shape.slots * 8 * MIB


def make_claim(
    ledger: Ledger, name: str, model: str, n_ctx: int, slots: int, weights: int
) -> Claim:
    """A claim with the estimate of the shape that the ledger asks for."""
    agent = AgentKey("bench", name)
    shape = ledger.shape_with(model, "f16", agent, n_ctx, slots)
    size = pool_bytes(shape)
    return Claim(agent, model, "f16", n_ctx, slots, shape, weights, size, n_ctx * 24 * KIB)


def filled(agents: int, models: int, mode: LedgerMode, rng: random.Random) -> Ledger:
    """A ledger with ``agents`` committed agents on ``models`` models."""
    ledger = Ledger(DeviceSpec("cpu", "cpu", mode, CAP, host_cap_bytes=CAP))
    ledger.observe(0, 0)
    for number in range(agents):
        n_ctx, slots = rng.randint(256, 32_768), rng.choice((1, 1, 4, 64))
        model = f"model{number % models}"
        held = ledger.reserve(make_claim(ledger, f"a{number}", model, n_ctx, slots, 300 * MIB), 0)
        assert isinstance(held, Reservation)
        ledger.commit(held, Measured(300 * MIB, held.claim.pool_bytes, 0))
    return ledger


def timed(rounds: int, call: Callable[[], object]) -> dict[str, float]:
    """Median and 99th percentile of a call, in µs."""
    took: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - start) / 1000)
    return {"median_us": round(median(took), 2), "p99_us": round(quantiles(took, n=100)[98], 2)}


def measure(ledger: Ledger, rounds: int) -> dict[str, dict[str, float]]:
    """Decisions on one ledger, which is left as it was."""
    fits = make_claim(ledger, "new", "model0", 4096, 1, 300 * MIB)
    fresh = make_claim(ledger, "new", "another", 4096, 1, 300 * MIB)
    huge = make_claim(ledger, "new", "another", 4096, 1, CAP)
    assert isinstance(ledger.decide(fits, 0), Admit)
    assert isinstance(ledger.decide(huge, 0), Deny)

    def cycle(claim: Claim) -> None:
        held = ledger.reserve(claim, 0)
        assert isinstance(held, Reservation)
        ledger.commit(held)
        ledger.release(claim.agent)

    return {
        "admit": timed(rounds, lambda: ledger.decide(fits, 0)),
        "deny": timed(rounds, lambda: ledger.decide(huge, 0)),
        "shape_with": timed(
            rounds, lambda: ledger.shape_with("model0", "f16", fits.agent, 4096, 1)
        ),
        "fit_bytes": timed(rounds, lambda: ledger.fit_bytes(huge)),
        "cycle_shared_model": timed(rounds, lambda: cycle(fits)),
        "cycle_new_model": timed(rounds, lambda: cycle(fresh)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="one line")
    options = parser.parse_args()
    report: dict[str, object] = {
        "seed": SEED,
        "rounds": options.rounds,
        "targets_us": {"decision": 100, "decision_10000_agents": 1000},
    }
    modes: tuple[LedgerMode, ...] = ("reserve", "timeshare")
    for mode in modes:
        for agents, models in ((3, 2), (options.agents, 5), (options.agents, options.agents)):
            ledger = filled(agents, models, mode, random.Random(SEED))
            name = f"{mode}, {agents} agents, {models} models"
            report[name] = measure(ledger, options.rounds)
    print(json.dumps({"bench": "ledger", **report}, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
