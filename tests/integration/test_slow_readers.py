"""A client that asks for everything and reads nothing: the broker's memory stays bounded, others
notice nothing, and what it did not read is there when it does (case D12)."""

from __future__ import annotations

import psutil
from gguf_models import Spec
from scene import MIB, NO_END, Scene, model, some_tokens, until

from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import Decode, Ping, Resume
from vram_conductor.protocol.values import Sampling, Usage

SPEC = Spec(vocab="bytes", seed=150, n_ctx_train=16_384)
JOBS = 4
TOKENS = 1500
MOST = 32 * MIB


def test_who_reads_nothing_costs_a_bounded_amount_and_nobody_else(scene: Scene) -> None:
    scene.conductor.register("chatty", model(SPEC), n_ctx=2048, slots=2)
    silent, broker = scene.raw(), psutil.Process(scene.broker_pid())
    done, before = scene.conductor.status().jobs_done, broker.memory_info().rss
    rids = [new_rid() for _ in range(JOBS)]

    def all_done() -> bool:
        silent.send(Ping(n=1))  # it is there, and does not read
        return scene.conductor.status().jobs_done >= done + JOBS

    with scene.undisturbed():
        for number, rid in enumerate(rids):
            silent.send(
                Decode(
                    rid=rid,
                    agent="chatty",
                    conversation=f"unread-{number}",
                    tokens=some_tokens(20, 3),
                    max_tokens=TOKENS,
                    sampling=Sampling(temperature=0),
                    logit_bias=list(NO_END.items()),
                    return_ids=True,
                    detach=True,
                )
            )
        # It has all the credit there is, and its messages wait in nobody's way.
        until(all_done, "its jobs are done, too")
        assert broker.memory_info().rss - before < MOST
    # It is dropped if that takes long; whoever comes for its output finds it whole.
    later = scene.raw()
    for rid in rids:
        later.send(Resume(rid=rid))
        pieces, end = later.result(rid)
        assert isinstance(end, Usage), end
        assert sum(len(piece.ids) for piece in pieces) == end.generated_tokens == TOKENS
