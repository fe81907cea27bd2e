"""``conductor chat``: a conversation with an agent, message by message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vram_conductor.client import chat_file
from vram_conductor.client.agent import Agent
from vram_conductor.client.chat_input import ChatInput, Typed
from vram_conductor.client.cli_decode import receipt, stream
from vram_conductor.client.history import History
from vram_conductor.client.output import Output
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.requests import DecodeOptions
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import plural
from vram_conductor.client.transcript_view import render_turns
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.errors import ConductorError, InvalidArgument, NotFound
from vram_conductor.protocol.values import Message

HELP = """\
  /history        what was said so far
  /reset          forget it and begin anew
  /fork NAME      copy the conversation, and go on in the copy
  /save FILE      write what was said to a file
  /load FILE      replace the conversation by that of a file
  /raw            plain text to continue instead of a chat, and back
  /help           this
  /quit           leave (also Ctrl-D); the conversation stays
A line that ends with \\ goes on with the next one; \"\"\" begins and ends a text of
many lines. // at the beginning of a line is a slash. Ctrl-C ends an answer and
keeps what was said."""

NO_TEMPLATE = (
    "this model has no chat template, so it does not know what a question is: it can only go on "
    "with plain text"
)


@dataclass(frozen=True)
class ChatOptions:
    """What the flags say: how every message is sent."""

    decode: DecodeOptions
    conversation: str
    system: str | None = None
    raw: bool = False
    receipt: bool = False


class Chat:
    """One sitting. Errors end it where its input is piped, and are told where somebody types."""

    def __init__(
        self,
        conductor: Conductor,
        agent: Agent,
        options: ChatOptions,
        output: Output,
        typed: ChatInput,
    ) -> None:
        self._conductor = conductor
        self._agent = agent
        self._options = options
        self._output = output
        self._typed = typed
        self._conversation = options.conversation
        self._raw = options.raw
        self._loaded: list[Turn] | None = None
        self._whole = False
        self._refused = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "history": self._show,
            "reset": self._reset,
            "fork": self._fork,
            "save": self._save,
            "load": self._load,
            "raw": self._switch,
            "help": lambda rest: output.news(HELP),
        }

    def run(self) -> None:
        """Until /quit or the end of the input.

        Raises:
            ConductorError: the agent does not exist; or anything, where nobody types.
        """
        self._greet()
        while True:
            try:
                typed = self._typed.read()
                if typed is None or (typed.is_command and typed.command[0] in ("quit", "exit")):
                    break
                self._do(typed)
            except KeyboardInterrupt:
                if not self._typed.is_terminal:
                    raise
                self._output.news("(Ctrl-D or /quit leaves)")
        if self._typed.is_terminal:
            self._output.end_line()

    def _do(self, typed: Typed) -> None:
        try:
            if typed.is_command:
                self._command(*typed.command)
            else:
                self._say(typed.text)
        except ConductorError as error:
            self._output.end_line()
            no_template = error.reason == "no_chat_template"
            if not self._typed.is_terminal:
                if no_template:
                    self._output.news(f"{NO_TEMPLATE}: conductor chat --raw {self._agent.name}")
                raise
            if no_template:
                self._refused = typed.text
                self._output.news(f"{NO_TEMPLATE}. /raw sends what you typed as that")
            else:
                self._output.complain(error, "chat")
        except OSError as error:
            if not self._typed.is_terminal:
                raise
            self._output.news(f"{error.strerror}: {error.filename}")

    # --- messages -----------------------------------------------------------------------------

    def _greet(self) -> None:
        """Raises NotFound ``no_such_agent``."""
        before = self._history()
        if not self._typed.is_terminal:
            return
        so_far = plural(before.turns_total, "turn") if before else "nothing said yet"
        name = f"{self._agent.name}, conversation {self._conversation}"
        self._output.news(f"{name}: {so_far}. /help shows commands, Ctrl-D leaves")

    def _say(self, text: str) -> None:
        try:
            result = stream(self._conductor, self._ask(text), self._output)
        except ConductorError as error:
            if error.reason != "template_not_appendable" or self._whole:
                raise
            # Such a template needs all messages every time.
            self._whole = True
            result = stream(self._conductor, self._ask(text), self._output)
        self._output.end_line()
        if result is not None:
            self._loaded = None
            self._told(result)

    def _told(self, result: Result) -> None:
        self._output.value(result)
        if self._options.receipt:
            self._output.news(receipt(result.usage))

    def _ask(self, text: str) -> Reply:
        options: DecodeOptions = {**self._options.decode, "conversation": self._conversation}
        before = self._loaded
        if self._raw:
            head = "" if before is None else "".join(turn.text or "" for turn in before)
            return self._agent.decode(prompt=head + text, continue_=before is None, **options)
        if before is None and self._whole:
            before = self._known()
        if before is None:
            return self._agent.chat(text, system=self._system(), **options)
        messages = [_message(turn) for turn in before if turn.text is not None]
        if len(messages) < len(before):
            self._output.news("(what is not known as text is left out)")
        system = self._options.system
        if system is not None and not messages:
            messages = [Message("system", system)]
        return self._agent.chat([*messages, Message("user", text)], **options)

    def _system(self) -> str | None:
        """The system message, where nothing was said before."""
        if self._options.system is None:
            return None
        before = self._history()
        return None if before is not None and before.tokens else self._options.system

    # --- commands -----------------------------------------------------------------------------

    def _command(self, word: str, rest: str) -> None:
        command = self._commands.get(word)
        if command is None:
            raise InvalidArgument("bad_value", f"there is no command /{word}; see /help")
        command(rest)

    def _show(self, rest: str) -> None:
        if self._loaded is not None:
            self._print(self._loaded, 0)
            self._output.news("(loaded; it is sent with your next message)")
            return
        before = self._history()
        if before is None or not before.turns_total:
            self._output.news("nothing was said yet")
        else:
            self._print(before.turns, before.turns_total - len(before.turns))

    def _print(self, turns: Sequence[Turn], forgotten: int) -> None:
        self._output.value({"turns": list(turns)})
        self._output.text(render_turns(turns, forgotten=forgotten))

    def _reset(self, rest: str) -> None:
        self._agent.reset(self._conversation)
        self._loaded = None
        self._output.news("forgotten; this is a new conversation")

    def _fork(self, rest: str) -> None:
        made = self._agent.fork(_argument("fork", "NAME", rest), conversation=self._conversation)
        self._conversation = made.conversation
        kv = "with its KV" if made.kv == "copied" else f"without KV ({made.reason or 'empty'})"
        self._output.news(f"this is {made.conversation} now, a copy of {made.tokens} tokens {kv}")

    def _save(self, rest: str) -> None:
        path = _argument("save", "FILE", rest)
        turns = self._known()
        chat_file.save(path, self._agent.name, self._conversation, turns)
        unknown = sum(turn.text is None for turn in turns)
        lacks = f"; {unknown} of them not known as text, so it cannot be loaded" if unknown else ""
        self._output.news(f"{plural(len(turns), 'turn')} saved to {path}{lacks}")

    def _load(self, rest: str) -> None:
        path = _argument("load", "FILE", rest)
        self._loaded = chat_file.load(path)
        self._output.news(
            f"{plural(len(self._loaded), 'turn')} loaded from {path}: with your next message they "
            "take the place of this conversation"
        )

    def _switch(self, rest: str) -> None:
        self._raw = not self._raw
        how = "plain text to continue" if self._raw else "messages of a chat"
        self._output.news(f"what you type is {how} now")
        refused, self._refused = self._refused, ""
        if self._raw and refused:
            self._say(refused)

    # --- the record ---------------------------------------------------------------------------

    def _known(self) -> list[Turn]:
        """What was said, as far as it is known."""
        if self._loaded is not None:
            return self._loaded
        before = self._history()
        return [] if before is None else before.turns

    def _history(self) -> History | None:
        """None if there is no such conversation yet. Raises NotFound ``no_such_agent``."""
        try:
            return self._agent.history(self._conversation)
        except NotFound as error:
            if error.reason != "no_such_conversation":
                raise
            return None


def _message(turn: Turn) -> Message:
    """A turn as a chat message; raw ones get the role that they had in effect."""
    role = turn.role or ("assistant" if turn.generated else "user")
    return Message(role, turn.text or "")


def _argument(command: str, name: str, given: str) -> str:
    """Raises InvalidArgument ``bad_value``."""
    if not given:
        raise InvalidArgument("bad_value", f"/{command} needs a {name}; see /help", field=name)
    return given
