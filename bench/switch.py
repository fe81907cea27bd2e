"""Time to first token after a switch of conversation, over computing its context again.

Two agents take turns, about 700 tokens of context each, n_ctx 1024, one new token, room for one
pool. Two settings per model: the other agent uses the same model (its KV gives way), or another
model (its whole pool gives way and this one's is made anew). The reference is the first turn of
a fresh conversation with the same tokens, in the same run.

    .venv/bin/python bench/switch.py [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

from texts import token_ids

from vram_conductor.client import Conductor
from vram_conductor.client.demo_models import DemoModel, prepare
from vram_conductor.client.output import Output
from vram_conductor.client.stage import Stage, StageDevice

N_CTX = 1024
CONTEXT_TOKENS = 700
TARGET = {"smollm2-135m": 30, "gemma3-270m": 20}
SLACK_BYTES = 1 << 20


@dataclass
class Turn:
    """Times of one turn, in milliseconds, as the client sees them."""

    ttft_ms: float
    reused: int
    restored: bool


def turn(conductor: Conductor, agent: str, tokens: list[int], *, new: bool, name: str) -> Turn:
    began = time.perf_counter()
    reply = conductor.decode(
        agent, tokens=tokens, continue_=not new, conversation=name, max_tokens=1, temperature=0
    )
    usage = reply.result().usage
    took = 1000 * (time.perf_counter() - began)
    return Turn(took, usage.reused_tokens, usage.swap.restored)


def pair(conductor: Conductor, agents: tuple[str, str], rounds: int) -> dict[str, object]:
    """Switch to ``agents[0]`` and back ``rounds`` times; numbers of ``agents[0]``."""
    here, other = agents
    contexts = {agent: token_ids(CONTEXT_TOKENS, 40_000, seed) for seed, agent in enumerate(agents)}
    prefill: list[float] = []
    for index in range(2):
        # The first one warms up; each starts from nothing.
        cold = turn(conductor, here, contexts[here], new=True, name=f"cold-{index}")
        assert cold.reused == 0
        prefill.append(cold.ttft_ms)
    for agent in agents:
        turn(conductor, agent, contexts[agent], new=True, name="main")
    switched: list[float] = []
    for index in range(rounds + 1):
        for agent in (here, other):
            found = turn(conductor, agent, [2000 + index], new=False, name="main")
            assert found.reused >= CONTEXT_TOKENS, found
            assert found.restored, found
            if agent == here and index > 0:
                switched.append(found.ttft_ms)
    cold = turn(conductor, here, contexts[here], new=True, name="cold-last")
    prefill = [prefill[1], cold.ttft_ms]
    ratio = statistics.median(prefill) / statistics.median(switched)
    return {
        "switch_ms": round(statistics.median(switched), 1),
        "switch_ms_max": round(max(switched), 1),
        "reprefill_ms": round(statistics.median(prefill), 1),
        "ratio": round(ratio, 1),
    }


def capacity(models: list[DemoModel]) -> int:
    """All weights and the larger pool, and not a pool more."""
    return (
        sum(model.weights_bytes for model in models)
        + max(model.pool_bytes for model in models)
        + SLACK_BYTES
    )


def measure(rounds: int, *, gemma: bool) -> list[dict[str, object]]:
    models = prepare(Output(json=True), lambda text: None, gemma=gemma, n_ctx=N_CTX)
    folders = sorted({str(model.path.parent) for model in models})
    device = StageDevice(capacity_bytes=capacity(models))
    found: list[dict[str, object]] = []
    with (
        Stage([device], worker=f"model_dirs = {folders!r}") as stage,
        Conductor(stage.endpoint) as conductor,
    ):
        for index, model in enumerate(models):
            for letter in "ab":
                conductor.register(f"{letter}{index}", model.name, n_ctx=N_CTX)
        for index, model in enumerate(models):
            for setting, other in (("same model", f"b{index}"), ("other model", f"a{1 - index}")):
                numbers = pair(conductor, (f"a{index}", other), rounds)
                head = {"bench": "switch", "model": model.name, "other": setting}
                found.append(head | numbers | {"target": TARGET.get(model.name, 0)})
                for agent in (f"a{index}", other):
                    for name in ("main", "cold-0", "cold-1", "cold-last"):
                        conductor.reset(agent, name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gemma", action="store_true", help="accept Gemma's terms and fetch it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.rounds, gemma=args.gemma)
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['model']} (switching from {row['other']}): {row['switch_ms']} ms against "
            f"{row['reprefill_ms']} ms, {row['ratio']} x (target {row['target']} x)"
        )


if __name__ == "__main__":
    main()
