"""``conductor decode``: one job, streamed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, cast

from vram_conductor.client.agent import Agent
from vram_conductor.client.cli_agents import SAMPLING, add_sampling, connect, given, talking
from vram_conductor.client.job_watch import JobWatch
from vram_conductor.client.output import Output
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.requests import DecodeOptions
from vram_conductor.client.structure_files import structure
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size
from vram_conductor.protocol.errors import Cancelled, InvalidArgument
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.values import Message, Usage

EXIT_INTERRUPTED = 130
CANCEL_S = 10.0
"""How long the end of a cancelled job is waited for."""

_ABOUT = """\
TEXT is the agent's next user message and its answer is streamed to stdout; the conversation goes on
with the next call. Ctrl-C ends the answer and keeps what was said. --raw gives plain text to
continue instead, for models without a chat template.
"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``decode``."""
    decode = commands.add_parser(
        "decode", parents=[talking(common)], help="say something to an agent", description=_ABOUT
    )
    decode.add_argument("agent", metavar="AGENT")
    decode.add_argument("text", metavar="TEXT", help="what to say; '-' reads it from stdin")
    decode.add_argument("--raw", action="store_true", help="plain text, no chat template")
    decode.add_argument("--system", metavar="TEXT", help="a system message before the first turn")
    decode.add_argument(
        "--new", action="store_true", help="TEXT is the whole conversation, not its next turn"
    )
    decode.add_argument("--conversation", metavar="NAME", default=DEFAULT_CONVERSATION)
    decode.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: until the context is full"
    )
    decode.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop string; repeatable"
    )
    decode.add_argument("--grammar", type=Path, metavar="FILE", help="GBNF that the answer follows")
    decode.add_argument(
        "--json-schema",
        type=Path,
        metavar="FILE",
        help="JSON by this schema, unless --max-tokens cuts it off",
    )
    decode.add_argument("--priority", type=int, metavar="N", help="-100 to 100")
    decode.add_argument("--queue-ms", type=int, metavar="MS", help="give up if not started by then")
    decode.add_argument(
        "--timeout-ms", type=int, metavar="MS", help="give up if not finished by then"
    )
    decode.add_argument(
        "--expect-version", type=int, metavar="N", help="only if the conversation has this version"
    )
    decode.add_argument("--receipt", action="store_true", help="what it took, on stderr")
    add_sampling(decode)
    decode.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    if args.raw and args.system:
        raise InvalidArgument("bad_flags", "--system needs the chat template: leave out --raw")
    text = _stdin() if args.text == "-" else args.text
    if not text:
        raise InvalidArgument("empty_input", "TEXT is empty: there is nothing to say")
    names = ["max_tokens", "queue_ms", "timeout_ms", "priority", "expect_version", *SAMPLING]
    options: DecodeOptions = {"conversation": args.conversation, "stop": args.stop}
    options.update(cast(DecodeOptions, given(args, names)))
    options.update(structure(args.grammar, args.json_schema))
    with connect(args) as conductor:
        reply = _ask(conductor.agent(args.agent), args, text, options)
        result = stream(conductor, reply, output)
        if result is None:
            return EXIT_INTERRUPTED
    output.value(result)
    output.end_line()
    if args.receipt:
        output.news(receipt(result.usage))
    return EXIT_INTERRUPTED if result.usage.stop_reason == "cancelled" else 0


def _stdin() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("(your message; end it with Ctrl-D)\n")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            "bad_input", f"stdin is not UTF-8 (byte {error.start}); convert it first"
        ) from None


def _ask(agent: Agent, args: argparse.Namespace, text: str, options: DecodeOptions) -> Reply:
    if args.raw:
        return agent.decode(prompt=text, continue_=not args.new, **options)
    if not args.new:
        return agent.chat(text, system=args.system, **options)
    system = [Message("system", args.system)] if args.system else []
    return agent.chat([*system, Message("user", text)], **options)


def _first(conductor: Conductor, reply: Reply, output: Output) -> str:
    """The first piece. Whoever waits long is told what for, if it is more than the job's turn."""
    usual = "waiting for the first token"
    with output.waiting(usual) as waiting:

        def tell(hindrance: str) -> None:
            waiting.now = hindrance or usual
            if hindrance:
                output.news(hindrance)

        def job() -> tuple[str, int] | None:
            return (conductor.principal, reply.queued.job) if reply.queued else None

        with JobWatch(conductor.status, job, tell):
            return next(reply, "")


def stream(conductor: Conductor, reply: Reply, output: Output) -> Result | None:
    """Print the pieces. Ctrl-C ends the answer and keeps what came: None if nothing came."""
    shown = 0
    try:
        piece = _first(conductor, reply, output)
        while piece:
            output.text(piece, end="")
            shown += len(piece)
            piece = next(reply, "")
        return reply.result()
    except KeyboardInterrupt:
        reply.cancel()
    try:
        result = reply.result(CANCEL_S)
    except Cancelled:
        output.news("cancelled; the conversation is as it was")
        return None
    output.text(result.text[shown:], end="")
    if result.usage.stop_reason == "cancelled":
        said = result.text or result.usage.generated_tokens
        kept = "the conversation keeps what was said" if said else "the conversation is as it was"
        output.news(f"cancelled; {kept}")
    return result


def receipt(usage: Usage) -> str:
    """One line: what was computed, re-used and moved for a job."""
    parts = [
        f"prompt {usage.prompt_tokens} ({usage.reused_tokens} re-used)",
        f"generated {usage.generated_tokens} ({usage.stop_reason})",
        f"first token after {duration(usage.ttft_ms)}, all {duration(usage.elapsed_ms)}",
    ]
    if usage.reprefilled_tokens:
        parts.append(f"re-prefilled {usage.reprefilled_tokens}: {usage.reprefill_reason}")
    if usage.swap.evicted:
        parts.append(f"evicted {', '.join(usage.swap.evicted)}")
    if usage.swap.restored:
        parts.append(f"KV restored, {size(usage.swap.bytes)} in {duration(usage.swap.ms)}")
    return "[" + "; ".join(parts) + f"; seed {usage.seed}, version {usage.state_version}]"
