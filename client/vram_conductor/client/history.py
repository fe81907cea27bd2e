"""A conversation's record as the client puts it together from pages (*pure*)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vram_conductor.protocol import conversations as wire
from vram_conductor.protocol.conversations import HistoryPage, Turn
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.values import Message


@dataclass(frozen=True)
class History:
    """What was said in a conversation.

    Attributes:
        version: of the conversation, for ``expect_version``.
        tokens: length of its transcript, which also holds what the chat template adds.
        turns: role and text of what was sent and generated; the oldest may have been forgotten.
        turns_total: how many there were.
        ids: the transcript's token ids, int; None: not asked for.
    """

    agent: str
    conversation: str
    version: int
    tokens: int
    turns: list[Turn] = field(default_factory=list)
    turns_total: int = 0
    ids: list[int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every turn is here, as text."""
        return len(self.turns) == self.turns_total and all(
            turn.text is not None for turn in self.turns
        )

    def messages(self) -> list[Message]:
        """The turns as chat messages; raw ones and unknown ones are left out."""
        return [
            Message(turn.role, turn.text)
            for turn in self.turns
            if turn.role and turn.text is not None
        ]


class HistoryReader:
    """Asks for one page after the other: :meth:`request`, :meth:`take`, until :attr:`is_done`."""

    def __init__(self, agent: str, conversation: str, *, ids: bool) -> None:
        self._request = wire.History(
            rid=new_rid(),
            agent=agent,
            conversation=conversation,
            from_token=0 if ids else None,
        )
        self._turns: list[Turn] = []
        self._ids: list[int] | None = [] if ids else None
        self._last: HistoryPage | None = None
        self.is_done: bool = False

    def request(self) -> wire.History:
        """The next message to send."""
        return self._request

    def take(self, page: HistoryPage) -> None:
        """The answer to it. Later pages are asked for at the first one's version."""
        self._last = page
        self._turns += page.turns
        if self._ids is not None:
            self._ids += page.ids
        self.is_done = page.next_turn is None and page.next_token is None
        self._request = wire.History(
            rid=new_rid(),
            agent=self._request.agent,
            conversation=self._request.conversation,
            from_turn=page.turns_total if page.next_turn is None else page.next_turn,
            from_token=page.next_token,
            expect_version=page.version,
        )

    def result(self) -> History:
        """All pages together."""
        page = self._last
        assert page is not None
        return History(
            agent=self._request.agent,
            conversation=page.conversation,
            version=page.version,
            tokens=page.tokens,
            turns=self._turns,
            turns_total=page.turns_total,
            ids=self._ids,
        )
