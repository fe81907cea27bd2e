"""A registered agent, for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from vram_conductor.client.aio_reply import AsyncReply
from vram_conductor.client.history import History
from vram_conductor.client.requests import DecodeOptions, Messages, TokenIds, chat_input
from vram_conductor.protocol.conversations import ForkReceipt
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.status import AgentStatus

if TYPE_CHECKING:
    from vram_conductor.client.aio import AsyncConductor


class AsyncAgent:
    """A name to talk to; made by ``AsyncConductor.register`` or ``AsyncConductor.agent``.

    Attributes:
        name: the agent's name.
        info: what the broker said at REGISTER; None for a handle of an agent that was registered
            elsewhere.
    """

    def __init__(self, conductor: AsyncConductor, name: str, info: AgentStatus | None) -> None:
        self._conductor = conductor
        self.name = name
        self.info = info

    def __repr__(self) -> str:
        return f"AsyncAgent({self.name!r})"

    def chat(
        self,
        text_or_messages: str | Messages,
        /,
        *,
        system: str | None = None,
        **options: Unpack[DecodeOptions],
    ) -> AsyncReply:
        """One chat turn; see ``Agent.chat``. Starts at once, without ``await``."""
        messages, append = chat_input(text_or_messages, system)
        return self.decode(messages=messages, continue_=append, **options)

    def decode(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        tokens: TokenIds | None = None,
        continue_: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> AsyncReply:
        """Run one job; see ``Agent.decode``. Starts at once, without ``await``."""
        return self._conductor.decode(
            self.name,
            prompt=prompt,
            messages=messages,
            tokens=tokens,
            continue_=continue_,
            **options,
        )

    async def reset(self, conversation: str = DEFAULT_CONVERSATION) -> int:
        """Forget a conversation; the agent stays. Returns its version. Raises NotFound."""
        return await self._conductor.reset(self.name, conversation)

    async def forget(self, conversation: str) -> None:
        """Forget a conversation and its name. Raises NotFound if the agent is gone."""
        await self._conductor.forget(self.name, conversation)

    async def fork(
        self,
        to: str,
        *,
        conversation: str = DEFAULT_CONVERSATION,
        expect_version: int | None = None,
    ) -> ForkReceipt:
        """Begin the conversation ``to`` as a copy of another; see ``AsyncConductor.fork``."""
        return await self._conductor.fork(
            self.name, to, conversation=conversation, expect_version=expect_version
        )

    async def history(
        self, conversation: str = DEFAULT_CONVERSATION, *, ids: bool = False
    ) -> History:
        """What was said in a conversation; see ``AsyncConductor.history``."""
        return await self._conductor.history(self.name, conversation, ids=ids)

    async def unregister(self) -> None:
        """Remove the agent and its conversations. Raises NotFound."""
        await self._conductor.unregister(self.name)
