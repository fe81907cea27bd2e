"""Programs that end carelessly end all the same: at once, in silence, and with a BYE."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
from scripted_broker import ScriptedBroker, begun

from vram_conductor.client import AsyncConductor, Conductor, Internal
from vram_conductor.protocol import messages as wire

PROGRAMS: dict[str, tuple[str, int]] = {
    "never closed": ("c = Conductor(); print(next(c.agent('a').chat('x')))", 0),
    "reply still running": ("c = Conductor(); r = c.agent('a').chat('x'); print(next(r))", 0),
    "exit in mid-stream": (
        "c = Conductor(); r = c.agent('a').chat('x'); print(next(r)); raise SystemExit(3)",
        3,
    ),
    "asyncio, never closed": (
        "import asyncio\n"
        "async def main():\n"
        "    global r\n"
        "    c = AsyncConductor()\n"
        "    await c.connect()\n"
        "    r = c.agent('a').chat('x')\n"
        "    print(await anext(r))\n"
        "asyncio.run(main())\n",
        0,
    ),
}


@pytest.mark.parametrize(("program", "code"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_careless_program_ends(program: str, code: int, broker: ScriptedBroker) -> None:
    broker.on[wire.Decode] = begun
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", "from vram_conductor.client import *\n" + program],
        env={**os.environ, "VRAM_CONDUCTOR_CLIENTS": broker.endpoint},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "one\n", "")
    broker.expect(wire.Bye)


def boom(*_: Any) -> Any:
    raise ZeroDivisionError("our own bug")


def test_a_failure_of_the_io_thread_reaches_whoever_waits(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on[wire.Decode] = begun
    with Conductor(broker.endpoint) as conductor:
        reply = conductor.agent("a").chat("x")
        assert next(reply) == "one"
        monkeypatch.setattr(conductor._core, "handle", boom)
        for wait in (conductor.ping, reply.result, conductor.list):
            with pytest.raises(Internal) as caught:
                wait()
            assert caught.value.reason == "client_failed"
            assert "our own bug" in caught.value.info.message


def test_a_failure_of_the_asyncio_link_reaches_whoever_waits(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on[wire.Decode] = begun

    async def main() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with AsyncConductor(broker.endpoint) as conductor:
            reply = conductor.agent("a").chat("x")
            assert await anext(reply) == "one"
            monkeypatch.setattr(conductor._core, "handle", boom)
            for wait in (conductor.ping, reply.result, conductor.list):
                with pytest.raises(Internal) as caught:
                    await wait()
                assert caught.value.reason == "client_failed"
        assert [type(context["exception"]) for context in told] == [ZeroDivisionError]

    asyncio.run(asyncio.wait_for(main(), 60))
