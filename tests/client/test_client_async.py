"""AsyncConductor against a scripted broker."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from scripted_broker import PIECES, Peer, ScriptedBroker, begun, eventually, nothing

from vram_conductor.client import (
    AsyncConductor,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    News,
    NotFound,
    Unavailable,
)
from vram_conductor.protocol import messages as wire

TEXT = "".join(PIECES)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_the_same_as_the_blocking_one(broker: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            assert conductor.broker_epoch == 1
            assert conductor.limits == {"n_ctx_max": 4096}
            agent = await conductor.register("coder", "m", n_ctx=512, temperature=0)
            assert agent.info is not None
            assert agent.info.n_ctx == 512
            assert [known.agent for known in await conductor.list()] == ["coder"]
            assert (await conductor.status()).version == "scripted"
            assert await conductor.ping() > 0
            reply = agent.chat("x")
            assert [piece async for piece in reply] == list(PIECES)
            assert (await reply.result()).text == reply.text == TEXT
            assert reply.ids == [0, 1, 2]
            assert reply.queued is not None
            assert reply.usage is not None
            await agent.reset()
            await agent.unregister()
            with pytest.raises(NotFound):
                await agent.unregister()
        broker.expect(wire.Bye)

    run(main())


def test_no_broker_is_a_typed_error_within_its_deadline(short_tmp: Path) -> None:
    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            await AsyncConductor(f"ipc://{short_tmp}/none.ipc", connect_timeout_s=0.3).connect()
        assert 0.3 <= time.monotonic() - began < 3.0
        assert caught.value.reason == "no_broker"

    run(main())


def test_not_opened_and_wrong_loop_are_told(broker: ScriptedBroker) -> None:
    conductor = AsyncConductor(broker.endpoint)
    with pytest.raises(FailedPrecondition, match="not_connected"):
        conductor.decode("a", prompt="x")

    async def main() -> None:
        await conductor.connect()
        reply = conductor.agent("a").chat("x")
        caught: list[FailedPrecondition] = []

        def elsewhere() -> None:
            for attempt in (reply.cancel, lambda: conductor.agent("a").chat("x")):
                try:
                    attempt()
                except FailedPrecondition as error:
                    caught.append(error)

        await asyncio.to_thread(elsewhere)
        assert [error.reason for error in caught] == ["wrong_loop"] * 2
        assert (await reply.result()).text == TEXT
        conductor.close()

    run(main())


def test_a_cancelled_task_cancels_its_job(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            reply = conductor.agent("a").chat("x")
            read: list[str] = []

            async def read_all() -> None:
                async for piece in reply:
                    read.append(piece)

            task = asyncio.create_task(read_all())
            while len(read) < len(PIECES):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            _, cancel = await asyncio.to_thread(broker.expect, wire.Cancel)
            assert cancel.rid == reply.rid
            assert (await reply.result()).usage.stop_reason == "cancelled"

    run(main())


def test_a_timeout_cancels_the_job(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await conductor.agent("a").chat("x").result()
            await asyncio.to_thread(broker.expect, wire.Cancel)

    run(main())


def test_a_detached_job_outlives_its_task(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await conductor.agent("a").chat("x", detach=True).result()
            gc.collect()
            await conductor.ping()
            assert broker.of(wire.Cancel) == []

    run(main())


def test_a_cancelled_request_loses_nothing_of_the_others(broker: ScriptedBroker) -> None:
    """Tasks are cancelled at every moment while replies stream beside them."""

    def slowly(peer: Peer, message: wire.List) -> None:
        peer.send(wire.Ok(rid=message.rid, body={"agents": []}))

    broker.on[wire.List] = slowly
    broker.pieces = [f"{number} " for number in range(200)]

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:

            async def disturb() -> None:
                for pause in range(300):
                    task = asyncio.create_task(conductor.list())
                    for _ in range(pause % 7):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            disturber = asyncio.create_task(disturb())
            for _ in range(20):
                result = await conductor.agent("a").chat("x").result()
                assert result.text == "".join(broker.pieces)
            await disturber

    run(main())


def test_leaving_the_block_and_forgetting_cancel(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            async with conductor.agent("a").chat("x") as reply:
                assert await anext(reply) == PIECES[0]
            _, cancel = await asyncio.to_thread(broker.expect, wire.Cancel)
            assert cancel.rid == reply.rid
            async for piece in conductor.agent("a").chat("y"):
                assert piece == PIECES[0]
                break
            gc.collect()
            await asyncio.to_thread(broker.expect, wire.Cancel)

    run(main())


def test_hundreds_of_replies_at_once(broker: ScriptedBroker) -> None:
    asked: list[tuple[Peer, wire.Decode]] = []
    broker.on[wire.Decode] = lambda peer, message: asked.append((peer, message))

    def answer() -> None:
        eventually(lambda: len(asked) == 400, "all were sent")
        for seq in range(5):
            for peer, message in reversed(asked):
                peer.send(wire.Tokens(rid=message.rid, seq=seq, text=f"{message.prompt}.{seq} "))
        for peer, message in asked:
            peer.done(message.rid, 5)

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            replies = [conductor.agent("a").decode(prompt=str(number)) for number in range(400)]
            threading.Thread(target=answer).start()
            results = await asyncio.gather(*(reply.result() for reply in replies))
            for number, result in enumerate(results):
                assert result.text == "".join(f"{number}.{seq} " for seq in range(5))

    run(main())


def test_a_slow_reader_with_a_window_holds_the_broker_back(broker: ScriptedBroker) -> None:
    broker.pieces = [f"{number} " for number in range(100)]

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            reply = conductor.agent("a").chat("x", window=8)
            read = [await anext(reply) for _ in range(10)]
            await conductor.ping()
            released: list[int] = []
            await asyncio.to_thread(
                broker.do, lambda: released.append(broker.streams[reply.rid].released)
            )
            assert 10 <= released[0] <= 10 + 2 + 8
            read += [piece async for piece in reply]
            assert read == broker.pieces

    run(main())


def test_no_wake_up_is_missed_while_both_sides_talk(patient_broker: ScriptedBroker) -> None:
    """Sending can eat the signal that says that something arrived."""
    patient_broker.pieces = [f"{number} " for number in range(100)]

    async def main() -> None:
        async with AsyncConductor(patient_broker.endpoint) as conductor:

            async def read(window: int) -> None:
                for _ in range(10):
                    reply = conductor.agent("a").chat("x", window=window)
                    assert [piece async for piece in reply] == patient_broker.pieces

            await asyncio.gather(*(read(window) for window in (1, 2, 3, 5, 8)))

    run(main())


def test_two_tasks_may_read_one_reply(broker: ScriptedBroker) -> None:
    broker.pieces = [f"{number} " for number in range(100)]

    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            reply = conductor.agent("a").chat("x")

            async def read() -> list[str]:
                return [piece async for piece in reply]

            one, two = await asyncio.gather(read(), read())
            assert sorted(one + two) == sorted(broker.pieces)

    run(main())


def test_progress_and_deadlines(broker: ScriptedBroker) -> None:
    def slowly(peer: Peer, message: wire.Register) -> None:
        peer.send(wire.Progress(rid=message.rid, stage="load", done=1, total=2))
        peer.send(wire.Ok(rid=message.rid))

    broker.on[wire.Register] = slowly
    broker.on[wire.List] = nothing

    async def main() -> None:
        news: list[News] = []
        async with AsyncConductor(broker.endpoint, timeout_s=0.1) as conductor:
            await conductor.register("a", "m", on_progress=news.append)
            with pytest.raises(DeadlineExceeded):
                await conductor.list()
        assert [item.stage for item in news] == ["load"]

    run(main())


def test_close_while_streaming(broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        conductor = AsyncConductor(broker.endpoint)
        await conductor.connect()
        reply = conductor.agent("a").chat("x")
        assert await anext(reply) == PIECES[0]
        reader = asyncio.create_task(reply.result())
        await asyncio.sleep(0)
        conductor.close()
        conductor.close()
        with pytest.raises(Cancelled, match="closed"):
            await reader
        with pytest.raises(Cancelled, match="closed"):
            await conductor.ping()
        with pytest.raises(Cancelled, match="closed"):
            await conductor.agent("a").chat("x").result()
        reply.cancel()
        await asyncio.to_thread(broker.expect, wire.Bye)

    run(main())


def test_a_conductor_left_open_when_the_loop_ends(broker: ScriptedBroker) -> None:
    """Careless, but it must neither hang nor raise."""

    async def main() -> None:
        conductor = AsyncConductor(broker.endpoint)
        await conductor.connect()
        reply = conductor.agent("a").chat("x")
        assert await anext(reply) == PIECES[0]

    run(main())
    gc.collect()
