"""The clients' requests about conversations: what is sent, how pages are put together, what is
sent again after a lost connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from scripted_broker import Peer, ScriptedBroker, error_info, nothing

from vram_conductor.client import (
    Aborted,
    AsyncConductor,
    Conductor,
    ForkReceipt,
    InvalidArgument,
    Message,
    NotFound,
    OutOfRange,
    Turn,
)
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.conversations import Fork, History, HistoryPage
from vram_conductor.protocol.errors import Code

TURNS = [
    Turn(role="user", text="a", end=2),
    Turn(role="assistant", text="b", generated=True, end=4),
    Turn(text="c", end=5),
]
RECEIPT = ForkReceipt(
    conversation="side", version=1, tokens=5, source_version=3, kv="copied", kv_tokens=5, kv_bytes=9
)


@pytest.fixture
def conductor(broker: ScriptedBroker) -> Iterator[Conductor]:
    with Conductor(broker.endpoint) as conductor:
        yield conductor


def pages(peer: Peer, message: History) -> None:
    """One turn and two ids at a time."""
    end = None if message.from_token is None else message.from_token + 2
    following = message.from_turn + 1
    page = HistoryPage(
        conversation=message.conversation,
        version=3,
        tokens=5,
        turns_total=3,
        first_turn=message.from_turn,
        turns=TURNS[message.from_turn : following],
        next_turn=following if following < 3 else None,
        ids=[] if end is None else list(range(5))[end - 2 : end],
        next_token=end if end is not None and end < 5 else None,
    )
    peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(page)))


def copied(peer: Peer, message: Fork) -> None:
    peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(RECEIPT)))


def test_a_copy(broker: ScriptedBroker, conductor: Conductor) -> None:
    broker.on[Fork] = copied
    assert conductor.agent("coder").fork("side", conversation="plan", expect_version=3) == RECEIPT
    message = broker.of(Fork)[0]
    assert (message.agent, message.conversation, message.to) == ("coder", "plan", "side")
    assert message.expect_version == 3
    conductor.fork("coder", "side")
    assert broker.of(Fork)[1].conversation == "main"


def test_forgetting(broker: ScriptedBroker, conductor: Conductor) -> None:
    conductor.agent("coder").forget("side")
    message = broker.of(wire.Reset)[0]
    assert (message.conversation, message.forget) == ("side", True)


@pytest.mark.parametrize("ids", [True, False])
def test_a_long_history_is_put_together_at_one_version(
    broker: ScriptedBroker, conductor: Conductor, ids: bool
) -> None:
    broker.on[History] = pages
    found = conductor.agent("coder").history("plan", ids=ids)
    assert found.turns == TURNS
    assert found.ids == ([0, 1, 2, 3, 4] if ids else None)
    assert (found.version, found.tokens, found.turns_total) == (3, 5, 3)
    assert found.is_whole
    assert found.messages() == [Message("user", "a"), Message("assistant", "b")]
    asked = broker.of(History)
    assert [message.from_turn for message in asked] == [0, 1, 2]
    assert [message.expect_version for message in asked] == [None, 3, 3]
    assert len({message.rid for message in asked}) == 3


def test_a_history_that_changes_meanwhile(broker: ScriptedBroker, conductor: Conductor) -> None:
    def change(peer: Peer, message: History) -> None:
        if message.from_turn:
            peer.fail(message.rid, error_info(Code.ABORTED, "version_mismatch", version=4))
        else:
            pages(peer, message)

    broker.on[History] = change
    with pytest.raises(Aborted) as caught:
        conductor.history("coder")
    assert caught.value.details == {"version": 4}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"to": "a/b"}, InvalidArgument),
        ({"to": ""}, InvalidArgument),
        ({"to": 7}, InvalidArgument),
        ({"to": "x" * 65}, OutOfRange),
        ({"to": "a", "conversation": ".."}, InvalidArgument),
        ({"to": "a", "expect_version": -1}, InvalidArgument),
    ],
)
def test_mistakes_are_found_before_anybody_is_asked(
    broker: ScriptedBroker, conductor: Conductor, arguments: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        conductor.fork("coder", **arguments)
    with pytest.raises(InvalidArgument):
        conductor.history("coder", "a b")
    assert not broker.of(Fork)
    assert not broker.of(History)


def test_a_copy_is_asked_for_again_with_its_rid(
    broker: ScriptedBroker, conductor: Conductor
) -> None:
    broker.on[Fork] = nothing
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(conductor.fork, "coder", "side")
        broker.expect(Fork)
        broker.on[Fork] = copied
        broker.cut()
        assert asking.result(60) == RECEIPT
    first, second = broker.of(Fork)
    assert first == second


def test_the_asyncio_client_sends_the_same(broker: ScriptedBroker) -> None:
    async def talk() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            agent = conductor.agent("coder")
            assert await agent.fork("side", conversation="plan") == RECEIPT
            found = await agent.history("plan", ids=True)
            assert (found.turns, found.ids) == (TURNS, [0, 1, 2, 3, 4])
            await agent.forget("side")
            broker.on[History] = lambda peer, message: peer.fail(
                message.rid, error_info(Code.NOT_FOUND, "no_such_conversation")
            )
            with pytest.raises(NotFound, match="no_such_conversation"):
                await conductor.history("coder")
            broker.on[History] = nothing

    broker.on[Fork], broker.on[History] = copied, pages
    asyncio.run(talk())
    assert broker.of(Fork)[0].conversation == "plan"
    assert broker.of(wire.Reset)[0].forget
