"""Conversations of several principals on real sockets: what is another's does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from keyed_broker import KeyedBroker, until_in

from vram_conductor.client import Conductor
from vram_conductor.protocol.errors import NotFound, PermissionDenied


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[KeyedBroker]:
    process = KeyedBroker(short_tmp)
    with process:
        process.keyed_echo()
        yield process


def say(client: Conductor, conversation: str = "main") -> None:
    client.decode("coder", prompt="a secret", conversation=conversation, max_tokens=3).result()


def test_another_principals_conversation_is_not_found_and_not_told(broker: KeyedBroker) -> None:
    alice = until_in(broker, broker.keys.new("alice"))
    mallory = until_in(broker, broker.keys.new("mallory"))
    alice.register("coder", "echo", n_ctx=1024)
    say(alice)
    say(alice, "plan")
    for attempt in (
        lambda: mallory.history("coder", "plan", ids=True),
        lambda: mallory.fork("coder", "mine", conversation="plan"),
        lambda: mallory.reset("coder", "plan"),
        lambda: mallory.forget("coder", "plan"),
        lambda: say(mallory, "plan"),
    ):
        with pytest.raises(NotFound) as caught:
            attempt()
        assert caught.value.reason == "no_such_agent"
        assert "secret" not in repr(caught.value.info)
    # The same name is another agent of her own, where there is nothing.
    mallory.register("coder", "echo", n_ctx=1024)
    for attempt in (
        lambda: mallory.history("coder", "plan"),
        lambda: mallory.fork("coder", "mine", conversation="plan"),
    ):
        with pytest.raises(NotFound) as caught:
            attempt()
        assert caught.value.reason == "no_such_conversation"
    mallory.forget("coder", "plan")
    assert alice.history("coder", "plan").turns[0].text == "a secret"
    # Of the same principal, another key is as good.
    laptop = until_in(broker, broker.keys.new("laptop", principal="alice"))
    assert laptop.history("coder", ids=True) == alice.history("coder", ids=True)
    assert laptop.fork("coder", "mine", conversation="plan").kv == "absent"


def test_who_may_only_look_is_told_nothing_that_was_said(broker: KeyedBroker) -> None:
    alice = until_in(broker, broker.keys.new("alice"))
    looker = until_in(broker, broker.keys.new("looker", role="observer", principal="alice"))
    alice.register("coder", "echo", n_ctx=1024)
    say(alice)
    for attempt in (lambda: looker.history("coder"), lambda: looker.fork("coder", "mine")):
        with pytest.raises(PermissionDenied) as caught:
            attempt()
        assert caught.value.reason == "role_denied"
    assert [item.conversation for item in alice.list()[0].conversations] == ["main"]
