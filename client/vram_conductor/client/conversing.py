"""What the blocking client can do with conversations as such."""

from __future__ import annotations

from vram_conductor.client.answers import typed
from vram_conductor.client.calling import Calling
from vram_conductor.client.history import History, HistoryReader
from vram_conductor.client.requests import build_fork, build_reset, checked
from vram_conductor.protocol.conversations import ForkReceipt, HistoryPage
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION


class Conversing(Calling):
    """Part of ``Conductor``."""

    def reset(self, agent: str, conversation: str = DEFAULT_CONVERSATION) -> int:
        """Forget a conversation; the agent stays registered.

        Returns:
            The conversation's version from now on, for ``expect_version``.

        Raises:
            NotFound: no such agent.
            FailedPrecondition: ``conversation_busy``: a job waits or runs.
        """
        body = self._call(build_reset(new_rid(), agent, conversation))
        return int(body.get("version", 0))

    def forget(self, agent: str, conversation: str) -> None:
        """Forget a conversation, its name and version too. No error if there is none.

        Raises: as :meth:`reset`.
        """
        self._call(build_reset(new_rid(), agent, conversation, forget=True))

    def fork(
        self,
        agent: str,
        to: str,
        *,
        conversation: str = DEFAULT_CONVERSATION,
        expect_version: int | None = None,
    ) -> ForkReceipt:
        """Begin the conversation ``to`` as a copy of another of the same agent; afterwards they
        share nothing. What waits or runs in the original is not part of the copy.

        Returns:
            The receipt: whether the KV was copied, too; where not, the copy's next job computes
            its prompt again.

        Raises:
            NotFound: ``no_such_agent``, ``no_such_conversation``.
            AlreadyExists: ``conversation_exists``: ``to`` has tokens or jobs.
            Aborted: ``version_mismatch``.
            ResourceExhausted: ``too_many_conversations``.
        """
        message = build_fork(new_rid(), agent, conversation, to, expect_version)
        return typed(self._call(message), ForkReceipt)

    def history(
        self, agent: str, conversation: str = DEFAULT_CONVERSATION, *, ids: bool = False
    ) -> History:
        """What was said in a conversation; with ``ids`` its token ids, too.

        Raises:
            NotFound: ``no_such_agent``, ``no_such_conversation``.
            Aborted: ``version_mismatch``: a job ended while a long one was read; ask again.
        """
        reader = HistoryReader(agent, conversation, ids=ids)
        while not reader.is_done:
            reader.take(typed(self._call(checked(reader.request())), HistoryPage))
        return reader.result()
