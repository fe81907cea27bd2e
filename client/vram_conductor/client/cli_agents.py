"""``conductor`` commands that talk to a broker: status, list, register, decode …"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from vram_conductor.client.board import render, render_agents
from vram_conductor.client.defaults import find_config
from vram_conductor.client.effects import News
from vram_conductor.client.output import Output
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.requests import DecodeOptions, RegisterOptions
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size
from vram_conductor.protocol.config import client_endpoint, load_config
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.values import Usage

_SAMPLING: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repeat_penalty": float,
    "seed": int,
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the subcommands."""
    talk = argparse.ArgumentParser(add_help=False, parents=[common])
    talk.add_argument("--clients", metavar="ENDPOINT", help="the broker (default: this box's)")
    status = commands.add_parser("status", parents=[talk], help="ledger, agents, KV, queue")
    status.add_argument("--watch", type=float, metavar="SECONDS", help="draw it again and again")
    status.set_defaults(run=_status)
    listing = commands.add_parser("list", parents=[talk], help="your agents")
    listing.set_defaults(run=_list)
    _add_register(commands, talk)
    gone = commands.add_parser("unregister", parents=[talk], help="remove an agent")
    gone.add_argument("agent")
    gone.set_defaults(run=_unregister)
    _add_decode(commands, talk)
    reset = commands.add_parser("reset", parents=[talk], help="forget a conversation")
    reset.add_argument("agent")
    reset.add_argument("--conversation", default=DEFAULT_CONVERSATION)
    reset.set_defaults(run=_reset)


def _add_register(commands: Any, talk: argparse.ArgumentParser) -> None:
    register = commands.add_parser("register", parents=[talk], help="admit an agent")
    register.add_argument("agent")
    register.add_argument("--model", required=True, help="a name of the catalogue, or a path")
    register.add_argument("--n-ctx", type=int, help="guaranteed context, in tokens")
    register.add_argument("--kv-type", choices=["f16", "q8_0", "q4_0", "f32"], default="f16")
    register.add_argument("--device", help="for example cpu or cuda:0 (default: best fit)")
    register.add_argument("--slots", type=int, default=1, help="agents with KV in one pool")
    register.add_argument("--priority", type=int, default=0, help="higher runs first")
    _add_sampling(register)
    register.set_defaults(run=_register)


def _add_decode(commands: Any, talk: argparse.ArgumentParser) -> None:
    decode = commands.add_parser(
        "decode",
        parents=[talk],
        help="run one job and stream its text",
        description="The text is the agent's next user message; --raw takes it as plain text to "
        "continue. '-' reads it from stdin.",
    )
    decode.add_argument("agent")
    decode.add_argument("text", help="message or prompt; '-' for stdin")
    decode.add_argument("--raw", action="store_true", help="no chat template")
    decode.add_argument("--system", help="system message, with the first turn")
    decode.add_argument("--new", action="store_true", help="--raw: the text is the whole of it")
    decode.add_argument("--conversation", default=DEFAULT_CONVERSATION)
    decode.add_argument("--max-tokens", type=int)
    decode.add_argument("--stop", action="append", default=[], help="stop string; repeatable")
    decode.add_argument("--queue-ms", type=int, help="give up if not started by then")
    decode.add_argument("--timeout-ms", type=int, help="give up if not finished by then")
    decode.add_argument("--receipt", action="store_true", help="print the receipt on stderr")
    _add_sampling(decode)
    decode.set_defaults(run=_decode)


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling (default: the agent's, then the system's)")
    for name, kind in _SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind)


def connect(args: argparse.Namespace) -> Conductor:
    """A connection to the broker that the flags, the environment or the configuration name."""
    endpoint = args.clients
    if endpoint is None and args.config:
        endpoint = client_endpoint(load_config(find_config(args.config)).broker)
    return Conductor(endpoint, client="conductor")


def _given(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _status(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        while True:
            report = conductor.status()
            output.value(report)
            if args.watch is not None and not output.json:
                output.text("\x1b[2J\x1b[H", end="")
            output.text(render(report, output.width))
            if args.watch is None:
                return 0
            time.sleep(max(0.1, args.watch))


def _list(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        agents = conductor.list()
    output.value({"agents": agents})
    output.text(render_agents(agents))
    return 0


def _register(args: argparse.Namespace, output: Output) -> int:
    options: RegisterOptions = {
        "kv_type": args.kv_type,
        "slots": args.slots,
        "priority": args.priority,
    }
    options.update(_given(args, ["n_ctx", "device", *_SAMPLING]))  # type: ignore[typeddict-item]

    def tell(news: News) -> None:
        output.progress(news.stage, news.done, news.total)

    with connect(args) as conductor:
        began = time.monotonic()
        info = conductor.register(args.agent, args.model, on_progress=tell, **options).info
        took = duration(1000 * (time.monotonic() - began))
    output.value(info)
    if info is not None:
        shared = f", weights shared with {', '.join(info.shared_with)}" if info.shared_with else ""
        estimate = " (estimated: the pool is made at first use)" if info.unmeasured else ""
        output.text(
            f"{info.agent} admitted on {info.device} in {took}: {info.model}, n_ctx {info.n_ctx} "
            f"{info.kv_type}; weights {size(info.weights_bytes)}, pool {size(info.pool_bytes)}"
            f"{estimate}, parked state at most {size(info.state_bytes)}{shared}"
        )
    return 0


def _unregister(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        conductor.unregister(args.agent)
    output.value({"unregistered": args.agent})
    output.text(f"{args.agent} is gone")
    return 0


def _reset(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        conductor.reset(args.agent, args.conversation)
    output.value({"reset": args.agent, "conversation": args.conversation})
    output.text(f"{args.agent} has forgotten {args.conversation}")
    return 0


def _decode(args: argparse.Namespace, output: Output) -> int:
    text = sys.stdin.read() if args.text == "-" else args.text
    if args.raw and args.system:
        raise InvalidArgument("bad_flags", "--system needs the chat template: leave out --raw")
    options: DecodeOptions = {"conversation": args.conversation, "stop": args.stop}
    names = ["max_tokens", "queue_ms", "timeout_ms", *_SAMPLING]
    options.update(_given(args, names))  # type: ignore[typeddict-item]
    with connect(args) as conductor:
        agent = conductor.agent(args.agent)
        if args.raw:
            reply = agent.decode(prompt=text, continue_=not args.new, **options)
        else:
            reply = agent.chat(text, system=args.system, **options)
        result = _stream(reply, output)
    output.value(result)
    output.text("")
    if args.receipt:
        output.news(receipt(result.usage))
    return 0


def _stream(reply: Reply, output: Output) -> Result:
    """Print the pieces; Ctrl-C ends the answer and keeps what came."""
    try:
        for piece in reply:
            output.text(piece, end="")
    except KeyboardInterrupt:
        reply.cancel()
        output.news("\ncancelled; the conversation keeps what was said")
    return reply.result()


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
