"""Acts of the end-to-end tests in which several models share a device that cannot hold them: on a
cpu in tests/integration, on a GPU in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from scene import WAIT_S, Scene

from vram_conductor.client.reply import Result
from vram_conductor.protocol.status import DeviceStatus

POLL_S = 0.01
TOKENS = 8
LONGER = 100


class Watch:
    """What STATUS has shown of a device meanwhile.

    Attributes:
        seen: different reports of the worker.
        over: those in which more was there than may be.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.over: list[str] = []

    def look(self, device: DeviceStatus) -> None:
        cap = device.promised.cap_bytes
        self.seen.add((device.resident_bytes, device.swaps))
        # Others come without notice; what they take, the worker gives back as soon as it hears.
        if device.resident_bytes > cap:
            self.over.append(f"{device.resident_bytes} bytes are resident of {cap}")
        if device.promised.promised_bytes > cap:
            self.over.append(f"{device.promised.promised_bytes} bytes are promised of {cap}")


@contextmanager
def watched(scene: Scene, device: str) -> Generator[Watch]:
    """Look all the time; reports are further apart than looks."""
    watch, stop = Watch(), threading.Event()

    def run() -> None:
        while not stop.wait(POLL_S):
            watch.look(scene.device(device))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def alone(scene: Scene, agent: str, turns: Sequence[list[int]]) -> list[list[int]]:
    """What the agent says when nothing ever has to leave: short turns, then a longer answer."""
    said = [scene.run(agent, ids, max_tokens=TOKENS).ids for ids in turns]
    said.append(scene.run(agent, turns[0], conversation="long", max_tokens=LONGER).ids)
    for name in ("main", "long"):
        scene.conductor.reset(agent, name)
    return said


def in_turn(
    scene: Scene, agents: Sequence[str], turns: Sequence[list[int]]
) -> dict[str, list[Result]]:
    """Round after round, each agent's next turn: every one finds another's model on the device."""
    found: dict[str, list[Result]] = {agent: [] for agent in agents}
    for ids in turns:
        for agent in agents:
            found[agent].append(scene.run(agent, ids, max_tokens=TOKENS))
    return found


def beside_one_that_never_ends(
    scene: Scene, agents: Sequence[str], words: list[int], endless: int
) -> dict[str, list[int]]:
    """One agent wants ``endless`` tokens; the others get their answers all the same, while that
    one is not done. It is cancelled then; the beginning of what it said is returned, too."""
    first, others = agents[0], agents[1:]
    options = {"conversation": "long"}
    reply = scene.start(first, words, max_tokens=endless, **options)
    next(reply)
    # And again from the start, for machines on which it would be over before its time slice is.
    again = {**options, "continue_": False, "max_tokens": endless}
    more = [scene.start(first, words, **again) for _ in range(3)]
    replies = {agent: scene.start(agent, words, max_tokens=LONGER, **options) for agent in others}
    results = {agent: reply.result(WAIT_S) for agent, reply in replies.items()}
    assert {job.agent for job in scene.conductor.status().jobs} == {first}, "it is not done"
    while len(reply.ids) < LONGER:
        next(reply)
    for each in (*more, reply):
        each.cancel()
    for each in more:
        each.result(WAIT_S)
    results[first] = reply.result(WAIT_S)
    assert all(result.usage.reprefilled_tokens == 0 for result in results.values())
    return {agent: result.ids[:LONGER] for agent, result in results.items()}
