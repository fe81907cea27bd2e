"""A batch job and a chat that want the same slot: the chat does not wait for the batch to end, and
the batch loses nothing."""

from __future__ import annotations

from gguf_models import Spec
from scene import Scene, model, some_tokens, until

from vram_conductor.client.reply import Reply

SPEC = Spec(vocab="bytes", seed=73, n_ctx_train=16_384)
WORDS = [some_tokens(30, seed) for seed in range(3)]
LONG = 1200


def batch_job(scene: Scene) -> Reply:
    reply = scene.start("batch", WORDS[0], max_tokens=LONG, priority=-10)
    next(reply)
    until(
        lambda: any(job.generated_tokens > 30 for job in scene.conductor.status().jobs),
        "the batch job is in the middle of it",
    )
    return reply


def test_a_chat_does_not_wait_for_a_batch_job(scene: Scene) -> None:
    for agent, priority in (("batch", 0), ("chat", 20)):
        scene.conductor.register(agent, model(SPEC), n_ctx=4096, priority=priority)
    alone = scene.run("batch", WORDS[0], conversation="alone", max_tokens=LONG).ids
    expected = [scene.run("chat", ids, conversation="alone", max_tokens=4).ids for ids in WORDS]
    batch = batch_job(scene)
    found: list[list[int]] = []
    for ids in WORDS:
        found.append(scene.run("chat", ids, max_tokens=4).ids)
        jobs = scene.conductor.status().jobs
        assert [job.agent for job in jobs] == ["batch"], "it is not over, and it is not lost"
    assert found == expected
    result = batch.result(120)
    assert result.ids == alone
    assert result.usage.reprefilled_tokens == 0
    assert result.usage.swap.restored
