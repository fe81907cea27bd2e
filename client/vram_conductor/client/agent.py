"""A registered agent, for blocking callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from vram_conductor.client.history import History
from vram_conductor.client.reply import Reply
from vram_conductor.client.requests import DecodeOptions, Messages, TokenIds, chat_input
from vram_conductor.protocol.conversations import ForkReceipt
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.status import AgentStatus

if TYPE_CHECKING:
    from vram_conductor.client.sync import Conductor


class Agent:
    """A name to talk to; made by ``Conductor.register`` or ``Conductor.agent``. Thread-safe.

    Attributes:
        name: the agent's name.
        info: what the broker said at REGISTER (device, n_ctx, bytes …); None for a handle of an
            agent that was registered elsewhere.
    """

    def __init__(self, conductor: Conductor, name: str, info: AgentStatus | None) -> None:
        self._conductor = conductor
        self.name = name
        self.info = info

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"

    def chat(
        self,
        text_or_messages: str | Messages,
        /,
        *,
        system: str | None = None,
        **options: Unpack[DecodeOptions],
    ) -> Reply:
        """One chat turn, rendered with the model's own template.

        Args:
            text_or_messages: a text is the user's next message, appended to the conversation; a
                list of ``{"role": …, "content": …}`` is the whole conversation, of which the
                common prefix is re-used.
            system: with a text, a system message in front of it (in the first turn).
            options: see :class:`DecodeOptions`, e.g. ``max_tokens=64, temperature=0``.

        Returns:
            The running reply. It is cancelled when it is forgotten: keep it, iterate over it.

        Raises:
            InvalidArgument, OutOfRange: a wrong option. All else is raised by the reply.

        >>> with Conductor() as conductor:
        ...     conductor.agent("coder").chat("Count to three.").result().text
        'one, two, three.'
        """
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
    ) -> Reply:
        """Run one job. Exactly one of ``prompt``, ``messages``, ``tokens``.

        Args:
            prompt: raw text; special tokens in it are understood.
            messages: chat messages, for the model's own template.
            tokens: token ids (a list, a tuple or an array).
            continue_: True: the input is appended to the conversation; False: it is the whole of
                it, and what it has in common with the conversation is re-used.
            options: see :class:`DecodeOptions`.

        Returns:
            The running reply.

        Raises:
            InvalidArgument, OutOfRange: a wrong option. All else is raised by the reply.
        """
        return self._conductor.decode(
            self.name,
            prompt=prompt,
            messages=messages,
            tokens=tokens,
            continue_=continue_,
            **options,
        )

    def reset(self, conversation: str = DEFAULT_CONVERSATION) -> int:
        """Forget a conversation; the agent stays. Returns its version. Raises NotFound."""
        return self._conductor.reset(self.name, conversation)

    def forget(self, conversation: str) -> None:
        """Forget a conversation and its name. Raises NotFound if the agent is gone."""
        self._conductor.forget(self.name, conversation)

    def fork(
        self,
        to: str,
        *,
        conversation: str = DEFAULT_CONVERSATION,
        expect_version: int | None = None,
    ) -> ForkReceipt:
        """Begin the conversation ``to`` as a copy of another; see ``Conductor.fork``."""
        return self._conductor.fork(
            self.name, to, conversation=conversation, expect_version=expect_version
        )

    def history(self, conversation: str = DEFAULT_CONVERSATION, *, ids: bool = False) -> History:
        """What was said in a conversation; see ``Conductor.history``."""
        return self._conductor.history(self.name, conversation, ids=ids)

    def unregister(self) -> None:
        """Remove the agent and its conversations. Raises NotFound."""
        self._conductor.unregister(self.name)
