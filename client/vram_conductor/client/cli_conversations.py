"""``conductor`` commands about conversations: chat, history, fork, reset."""

from __future__ import annotations

import argparse
from typing import Any, cast

from vram_conductor.client.chat import Chat, ChatOptions
from vram_conductor.client.chat_input import ChatInput
from vram_conductor.client.cli_agents import SAMPLING, add_sampling, connect, given, talking
from vram_conductor.client.output import Output
from vram_conductor.client.requests import DecodeOptions
from vram_conductor.client.text import plural, size
from vram_conductor.client.transcript_view import render_turns
from vram_conductor.protocol.conversations import ForkReceipt
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION

_ABOUT = """\
Every line is a message to the agent, its answer is streamed. /help lists commands; Ctrl-C ends an
answer and keeps what was said, Ctrl-D leaves, and the conversation stays. Lines may be piped in,
too: then the first error ends it. --raw is for models without a chat template.
"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the subcommands."""
    talk = talking(common)
    _add_chat(commands, talk)
    history = commands.add_parser("history", parents=[talk], help="what was said to an agent")
    history.add_argument("agent", metavar="AGENT")
    _add_conversation(history)
    history.add_argument("--last", type=int, metavar="N", help="only the last N turns")
    history.add_argument("--ids", action="store_true", help="the transcript's token ids instead")
    history.set_defaults(run=_history)
    fork = commands.add_parser(
        "fork", parents=[talk], help="begin a conversation as a copy of another"
    )
    fork.add_argument("agent", metavar="AGENT")
    fork.add_argument("to", metavar="NAME", help="the copy's name")
    _add_conversation(fork)
    fork.add_argument(
        "--expect-version", type=int, metavar="N", help="only if the original has this version"
    )
    fork.set_defaults(run=_fork)
    reset = commands.add_parser("reset", parents=[talk], help="forget a conversation")
    reset.add_argument("agent", metavar="AGENT")
    _add_conversation(reset)
    reset.add_argument("--forget", action="store_true", help="its name and version, too")
    reset.set_defaults(run=_reset)


def _add_conversation(command: argparse.ArgumentParser) -> None:
    command.add_argument("--conversation", metavar="NAME", default=DEFAULT_CONVERSATION)


def _add_chat(commands: Any, talk: argparse.ArgumentParser) -> None:
    chat = commands.add_parser(
        "chat", parents=[talk], help="talk to an agent, message by message", description=_ABOUT
    )
    chat.add_argument("agent", metavar="AGENT")
    _add_conversation(chat)
    chat.add_argument("--raw", action="store_true", help="plain text, no chat template")
    chat.add_argument("--system", metavar="TEXT", help="a system message before the first turn")
    chat.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="of an answer; default: until the context is full",
    )
    chat.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop string; repeatable"
    )
    chat.add_argument("--receipt", action="store_true", help="what an answer took, on stderr")
    add_sampling(chat)
    chat.set_defaults(run=_chat)


def _chat(args: argparse.Namespace, output: Output) -> int:
    output.one_line = True
    if args.raw and args.system:
        raise InvalidArgument("bad_flags", "--system needs the chat template: leave out --raw")
    decode: DecodeOptions = {"stop": args.stop}
    decode.update(cast(DecodeOptions, given(args, ["max_tokens", *SAMPLING])))
    options = ChatOptions(decode, args.conversation, args.system, args.raw, args.receipt)
    with connect(args) as conductor:
        Chat(conductor, conductor.agent(args.agent), options, output, ChatInput()).run()
    return 0


def _history(args: argparse.Namespace, output: Output) -> int:
    if args.last is not None and args.last < 1:
        raise InvalidArgument("bad_value", "--last must be at least 1", field="last")
    with connect(args) as conductor:
        found = conductor.history(args.agent, args.conversation, ids=args.ids)
    turns = found.turns[-args.last :] if args.last else found.turns
    output.value(
        {
            "agent": found.agent,
            "conversation": found.conversation,
            "version": found.version,
            "tokens": found.tokens,
            "turns_total": found.turns_total,
            "turns": turns,
            "ids": found.ids,
        }
    )
    if args.ids:
        output.text(" ".join(map(str, found.ids or [])))
    else:
        output.text(render_turns(turns, forgotten=found.turns_total - len(found.turns)))
        about = f"version {found.version}, {plural(found.tokens, 'token')}"
        output.news(f"[{plural(found.turns_total, 'turn')}, {about}]")
    return 0


def _fork(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        made = conductor.fork(
            args.agent,
            args.to,
            conversation=args.conversation,
            expect_version=args.expect_version,
        )
    output.value(made)
    output.text(
        f"{args.agent}: {made.conversation} is a copy of {args.conversation} at version "
        f"{made.source_version}, {plural(made.tokens, 'token')}; {_kv(made)}"
    )
    return 0


def _kv(made: ForkReceipt) -> str:
    if made.kv == "copied":
        return f"KV copied, {size(made.kv_bytes)}"
    if not made.tokens:
        return "there was nothing to copy"
    return f"its KV was not copied ({made.reason}): the next job computes it again"


def _reset(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        if args.forget:
            conductor.forget(args.agent, args.conversation)
            version = 0
        else:
            version = conductor.reset(args.agent, args.conversation)
    output.value({"reset": args.agent, "conversation": args.conversation, "version": version})
    output.text(f"{args.agent} has forgotten its conversation {args.conversation}")
    return 0
