"""What the asyncio client can do with conversations as such."""

from __future__ import annotations

from vram_conductor.client.answers import typed
from vram_conductor.client.calling import AsyncCalling
from vram_conductor.client.history import History, HistoryReader
from vram_conductor.client.requests import build_fork, build_reset, checked
from vram_conductor.protocol.conversations import ForkReceipt, HistoryPage
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION


class AsyncConversing(AsyncCalling):
    """Part of ``AsyncConductor``."""

    async def reset(self, agent: str, conversation: str = DEFAULT_CONVERSATION) -> int:
        """Forget a conversation; see ``Conductor.reset``."""
        body = await self._call(build_reset(new_rid(), agent, conversation))
        return int(body.get("version", 0))

    async def forget(self, agent: str, conversation: str) -> None:
        """Forget a conversation and its name; see ``Conductor.forget``."""
        await self._call(build_reset(new_rid(), agent, conversation, forget=True))

    async def fork(
        self,
        agent: str,
        to: str,
        *,
        conversation: str = DEFAULT_CONVERSATION,
        expect_version: int | None = None,
    ) -> ForkReceipt:
        """Begin a conversation as a copy of another; see ``Conductor.fork``."""
        message = build_fork(new_rid(), agent, conversation, to, expect_version)
        return typed(await self._call(message), ForkReceipt)

    async def history(
        self, agent: str, conversation: str = DEFAULT_CONVERSATION, *, ids: bool = False
    ) -> History:
        """What was said in a conversation; see ``Conductor.history``."""
        reader = HistoryReader(agent, conversation, ids=ids)
        while not reader.is_done:
            reader.take(typed(await self._call(checked(reader.request())), HistoryPage))
        return reader.result()
