"""What clients ask about conversations (*pure*): RESET, FORK, HISTORY.

A copy is complete as soon as its transcript is written; its KV is the worker's affair, and the
answer waits for the worker's word on it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vram_conductor.broker.conversations import kv_quota
from vram_conductor.broker.conversations.copying import Copying
from vram_conductor.broker.conversations.opening import open_at
from vram_conductor.broker.errors import draining_error, version_error
from vram_conductor.broker.journal.records import ConversationCommitted, ConversationReset
from vram_conductor.broker.journal.restored import ID_BYTES
from vram_conductor.broker.registry import Agent, Conversation
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Copied, Copy, Failed, Forget
from vram_conductor.protocol.conversations import Fork, ForkReceipt, History, HistoryPage
from vram_conductor.protocol.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    error_from_info,
)
from vram_conductor.protocol.messages import Ok, Reset
from vram_conductor.protocol.tokens import unpack_tokens
from vram_conductor.protocol.values import AgentKey, ConversationKey

COPY_TIMEOUT_MS = 20_000
"""A worker that moves much answers late: then the copy is told to be without KV."""


class ConversationDesk:
    """Answers for conversations. Every method raises a ConductorError with nothing changed, or sees
    to it that OK follows for the message's rid."""

    def __init__(self, state: State, commander: Commander, freed: Callable[[Agent], None]) -> None:
        """``freed``: told that an agent's conversation was forgotten."""
        self._state = state
        self._commander = commander
        self._freed = freed

    # --- RESET --------------------------------------------------------------------------------

    def reset(self, session: Session, message: Reset) -> None:
        """Forget a conversation's tokens and KV, or the whole of it.

        Raises NotFound ``no_such_agent``, FailedPrecondition ``conversation_busy``.
        """
        agent = self._state.registry.get(AgentKey(session.principal, message.agent))
        conversation = agent.conversations.get(message.conversation)
        version = 0
        if conversation is not None:
            version = self._forget(agent, conversation, for_good=message.forget)
        self._freed(agent)
        self._state.to_client(session.peer, Ok(rid=message.rid, body={"version": version}))

    def _forget(self, agent: Agent, conversation: Conversation, *, for_good: bool) -> int:
        """Returns the version from now on."""
        state, key = self._state, conversation.key
        if conversation.busy:
            raise FailedPrecondition(
                "conversation_busy",
                f"conversation {key.conversation!r} has a job in flight; wait for it, or cancel "
                "it first",
                retryable=True,
                conversation=key.conversation,
            )
        conversation.clear()
        if for_good:
            del agent.conversations[key.conversation]
            conversation.version = 0
        state.append(ConversationReset(conversation=key, version=conversation.version))
        device = state.devices[agent.device]
        device.places.pop(key, None)
        if device.link is not None:
            device.link.known.pop(key, None)
            self._commander.send(
                device, lambda epoch, op: Forget(broker_epoch=epoch, op=op, conversation=key)
            )
        return conversation.version

    # --- FORK ---------------------------------------------------------------------------------

    def fork(self, session: Session, message: Fork) -> None:
        """Begin a conversation as a copy of another, as its last job that is over left it.

        Raises NotFound ``no_such_agent``, ``no_such_conversation``; Aborted ``version_mismatch``;
        AlreadyExists ``conversation_exists``; ResourceExhausted ``too_many_conversations``.
        """
        state = self._state
        if state.draining:
            raise error_from_info(draining_error())
        agent = state.registry.get(AgentKey(session.principal, message.agent))
        there = agent.conversations.get(message.to)
        if there is not None and _is_repeated(there, message.rid):
            self._again(session, there)
            return
        source = _find(agent, message.conversation, message.expect_version)
        if there is not None and (there is source or there.busy or there.transcript):
            raise AlreadyExists(
                "conversation_exists",
                f"agent {agent.key.agent!r} has a conversation {message.to!r} already; choose "
                "another name, or reset it first",
                conversation=message.to,
                version=there.version,
                tokens=there.tokens,
            )
        copy = open_at(state, agent, message.to)
        state.used(agent)
        self._write(agent, source, copy)
        receipt = ForkReceipt(
            conversation=message.to,
            version=copy.version,
            tokens=copy.tokens,
            source_version=source.version,
        )
        copy.copying = Copying(message.rid, session.peer, receipt)
        self._copy_kv(agent, source.key, copy, copy.copying)

    def _write(self, agent: Agent, source: Conversation, copy: Conversation) -> None:
        ids, turns = bytes(source.transcript), source.turns.view()
        copy.commit(0, ids, source.turns.first, turns)
        source.used_ns = copy.used_ns = self._state.now_ns
        link = self._state.devices[agent.device].link
        if link is not None:
            link.known.pop(copy.key, None)
        self._state.append(
            ConversationCommitted(
                conversation=copy.key,
                version=copy.version,
                keep=0,
                ids=ids,
                keep_turns=source.turns.first,
                turns=turns,
            )
        )

    def _again(self, session: Session, copy: Conversation) -> None:
        """The same request a second time: one answer, to whoever asked last."""
        copying = copy.copying
        assert copying is not None
        if copying.peer is not None:
            copying.peer = session.peer
        else:
            self._ok(session.peer, copying)

    def _copy_kv(
        self, agent: Agent, source: ConversationKey, copy: Conversation, copying: Copying
    ) -> None:
        device = self._state.devices[agent.device]
        link = device.link
        if not copy.transcript:
            self._answer(copying)
        elif link is None or link.draining:
            self._answer(copying, reason="no_worker")
        else:
            self._commander.send(
                device,
                lambda epoch, op: Copy(broker_epoch=epoch, op=op, source=source, target=copy.key),
                on_reply=lambda message, raw: self._copied(agent, copy, copying, message),
                on_lost=lambda error: self._answer(copying, reason=error.reason),
                timeout_ms=COPY_TIMEOUT_MS,
            )

    def _copied(
        self, agent: Agent, copy: Conversation, copying: Copying, message: ReplyMessage
    ) -> bool:
        if isinstance(message, Copied):
            tokens, size_bytes = message.n_tokens, message.state_bytes
            alive = self._state.registry.conversation(copy.key) is copy
            if tokens and alive and not copy.busy:
                device = self._state.devices[agent.device]
                device.note_place(copy.key, "parked", tokens, size_bytes)
                kv_quota.check(self._state, self._commander, copy.key.principal)
            self._answer(copying, tokens, size_bytes, message.reason)
        elif isinstance(message, Failed):
            self._answer(copying, reason=message.error.reason)
        else:
            self._answer(copying, reason="bad_worker_reply")
        return True

    def _answer(
        self, copying: Copying, tokens: int = 0, size_bytes: int = 0, reason: str = ""
    ) -> None:
        copying.receipt = msgspec.structs.replace(
            copying.receipt,
            kv="copied" if tokens else "absent",
            kv_tokens=tokens,
            kv_bytes=size_bytes,
            reason=reason,
        )
        peer, copying.peer = copying.peer, None
        if peer is not None:
            self._ok(peer, copying)

    def _ok(self, peer: bytes, copying: Copying) -> None:
        body = msgspec.to_builtins(copying.receipt)
        self._state.to_client(peer, Ok(rid=copying.rid, body=body))

    # --- HISTORY ------------------------------------------------------------------------------

    def history(self, session: Session, message: History) -> None:
        """A page of a conversation's turns and ids.

        Raises NotFound ``no_such_agent``, ``no_such_conversation``; Aborted ``version_mismatch``.
        """
        agent = self._state.registry.get(AgentKey(session.principal, message.agent))
        found = _find(agent, message.conversation, message.expect_version)
        first, turns, following = found.turns.page(message.from_turn)
        ids: list[int] = []
        next_token = None
        if message.from_token is not None:
            end = min(message.from_token + limits.HISTORY_PAGE_TOKENS_MAX, found.tokens)
            view = found.transcript[message.from_token * ID_BYTES : end * ID_BYTES]
            ids = unpack_tokens(bytes(view))
            next_token = end if end < found.tokens else None
        page = HistoryPage(
            conversation=message.conversation,
            version=found.version,
            tokens=found.tokens,
            turns_total=found.turns.total,
            first_turn=first,
            turns=turns,
            next_turn=following,
            ids=ids,
            next_token=next_token,
        )
        self._state.to_client(session.peer, Ok(rid=message.rid, body=msgspec.to_builtins(page)))


def _is_repeated(there: Conversation, rid: bytes) -> bool:
    """Whether this very FORK made what is there, and nothing has happened to it since."""
    copying = there.copying
    return copying is not None and copying.rid == rid and copying.receipt.version == there.version


def _find(agent: Agent, name: str, expected: int | None) -> Conversation:
    """Raises NotFound ``no_such_conversation``, Aborted ``version_mismatch``."""
    found = agent.conversations.get(name)
    if found is None:
        raise NotFound(
            "no_such_conversation",
            f"agent {agent.key.agent!r} has no conversation {name!r}; `conductor list` shows those "
            "that it has",
            conversation=name,
        )
    if expected is not None and expected != found.version:
        raise error_from_info(version_error(name, expected, found.version))
    return found
