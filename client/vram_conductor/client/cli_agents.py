"""``conductor`` commands about agents: status, list, register, unregister."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from typing import Any, cast

from vram_conductor.client.board import render
from vram_conductor.client.board_agents import render_agents
from vram_conductor.client.defaults import find_config
from vram_conductor.client.effects import News
from vram_conductor.client.live_line import Waiting
from vram_conductor.client.model_argument import model_argument
from vram_conductor.client.output import Output
from vram_conductor.client.requests import RegisterOptions
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size
from vram_conductor.client.time_argument import seconds
from vram_conductor.protocol.config import client_endpoint, load_config, overlay
from vram_conductor.protocol.errors import ConductorError, NotFound
from vram_conductor.protocol.status import AgentStatus

SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "0 disables"),
    "top_p": (float, "nucleus mass, at most 1"),
    "min_p": (float, "0 to 1"),
    "repeat_penalty": (float, "1 disables"),
    "presence_penalty": (float, "-2 to 2; 0 disables"),
    "frequency_penalty": (float, "-2 to 2; 0 disables"),
    "penalty_last_n": (int, "tokens that are penalised; -1: all"),
    "seed": (int, "default: a fresh one each time"),
}
_DOING = {
    "worker": "waiting for a worker for",
    "estimate": "estimating",
    "load": "loading",
}
"""Stages of PROGRESS."""

WATCH_MIN_S = 0.1

LOOK_S = 1.0
"""How often ``register --ephemeral`` looks whether its agent is still there."""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the subcommands."""
    talk = talking(common)
    status = commands.add_parser(
        "status", parents=[talk], help="the ledger, agents, where each KV is, the queue"
    )
    status.add_argument(
        "--watch", type=float, metavar="S", help="again every S seconds, until Ctrl-C"
    )
    status.set_defaults(run=_status)
    listing = commands.add_parser("list", parents=[talk], help="your agents")
    listing.set_defaults(run=_list)
    _add_register(commands, talk)
    gone = commands.add_parser(
        "unregister", parents=[talk], help="remove an agent and its conversations"
    )
    gone.add_argument("agent", metavar="AGENT")
    gone.add_argument("--principal", help="whose, for an admin (default: yours)")
    gone.set_defaults(run=_unregister)


def talking(common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of every command that talks to a broker."""
    talk = argparse.ArgumentParser(add_help=False, parents=[common])
    talk.add_argument("--clients", metavar="ENDPOINT", help="the broker (default: this box's)")
    talk.add_argument("--key", metavar="FILE", help="key file, for a broker over tcp")
    return talk


def _add_register(commands: Any, talk: argparse.ArgumentParser) -> None:
    register = commands.add_parser(
        "register", parents=[talk], help="admit an agent: reserve its bytes, load its model"
    )
    register.add_argument("agent", metavar="AGENT", help="a name, unique among yours")
    register.add_argument(
        "--model",
        required=True,
        help="a name of the catalogue (conductor models list), the path of a GGUF file on this "
        "machine, or the name of one in the models folder",
    )
    register.add_argument(
        "--n-ctx",
        type=int,
        metavar="TOKENS",
        help="guaranteed context (default: the broker's default_n_ctx, or what the model was "
        "trained with if that is less)",
    )
    register.add_argument(
        "--kv-type",
        choices=["f16", "q8_0", "q4_0", "f32"],
        help="KV cache; q8_0 takes half of f16 (default: the broker's default_kv_type)",
    )
    register.add_argument("--device", help="for example cpu or cuda:0 (default: best fit)")
    register.add_argument(
        "--slots",
        type=int,
        default=1,
        metavar="N",
        help="agents of the model that may have KV on the device at once",
    )
    register.add_argument(
        "--priority", type=int, default=0, metavar="N", help="-100 to 100, higher runs first"
    )
    _add_ends(register)
    add_sampling(register)
    register.set_defaults(run=_register)


def _add_ends(register: argparse.ArgumentParser) -> None:
    """When an agent goes by itself."""
    register.add_argument(
        "--ephemeral",
        action="store_true",
        help="only as long as this command runs, which waits: Ctrl-C unregisters the agent",
    )
    register.add_argument(
        "--ttl",
        "--ttl-s",
        dest="ttl_s",
        type=seconds,
        metavar="TIME",
        help="unregister it when it has been idle for so long, for example 90s, 10m, 1h",
    )
    register.add_argument(
        "--linger",
        dest="linger_s",
        type=seconds,
        metavar="TIME",
        help="the weights leave the device so long after the last job (they come back with the "
        "next), and stay for so long after the last agent has gone",
    )


def add_sampling(command: argparse.ArgumentParser) -> None:
    """One flag per sampling parameter."""
    group = command.add_argument_group("sampling (default: the agent's, then the system's)")
    for name, (kind, text) in SAMPLING.items():
        metavar = "N" if kind is int else "X"
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)


def connect(args: argparse.Namespace, **patience_s: float) -> Conductor:
    """A connection to the broker that the flags, the environment or the configuration name.
    ``patience_s``: timeouts of :class:`Conductor`."""
    endpoint, key = args.clients, args.key
    if args.config:
        config = overlay(load_config(find_config(args.config)), os.environ)
        endpoint = endpoint or client_endpoint(config.broker)
        key = key or config.client.key
    return Conductor(endpoint, key=key, client="conductor", **patience_s)


def given(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The flags of ``names`` that were used."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _status(args: argparse.Namespace, output: Output) -> int:
    output.one_line = args.watch is not None
    with connect(args) as conductor:
        while True:
            report = conductor.status()
            if args.watch is None:
                output.value(report)
                output.text(render(report, output.width))
                return 0
            output.value(report)
            output.draw(render(report, output.width))
            time.sleep(max(WATCH_MIN_S, args.watch))


def _list(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        agents = conductor.list()
    output.value({"agents": agents})
    output.text(render_agents(agents, output.width))
    return 0


def _register(args: argparse.Namespace, output: Output) -> int:
    names = ["n_ctx", "device", "kv_type", "slots", "priority", "ttl_s", "linger_s", *SAMPLING]
    options = cast(RegisterOptions, given(args, names))
    if args.ephemeral:
        options["ephemeral"] = True
    with connect(args) as conductor:
        began = time.monotonic()
        with output.waiting(f"asking for {args.agent}") as waiting:
            info = _admitted(conductor, args, options, output, waiting)
        output.value(info)
        if info is not None:
            output.text(_facts(info, duration(1000 * (time.monotonic() - began))))
        if args.ephemeral:
            _hold(conductor, args.agent, output)
    return 0


def _facts(info: AgentStatus, took: str) -> str:
    shared = f", shared with {', '.join(info.shared_with)}" if info.shared_with else ""
    estimate = " (an estimate: it is made at first use)" if info.unmeasured else ""
    return (
        f"{info.agent} admitted on {info.device} in {took}: {info.model}, n_ctx {info.n_ctx}, "
        f"KV {info.kv_type}\n"
        f"  weights       {size(info.weights_bytes)}{shared}\n"
        f"  pool          {size(info.pool_bytes)}{estimate}\n"
        f"  parked state  {size(info.state_bytes)} at most, in shared memory"
    )


def _hold(conductor: Conductor, agent: str, output: Output) -> None:
    """Wait until somebody has had enough, or the agent has gone without this command.

    Raises:
        NotFound: ``no_such_agent``. Unauthenticated: the key was revoked.
    """
    told = ""
    with contextlib.suppress(KeyboardInterrupt):
        output.news(f"{agent} stays until this command ends: Ctrl-C unregisters it")
        while not threading.Event().wait(LOOK_S):
            try:
                there = any(mine.agent == agent for mine in conductor.list())
            except ConductorError as error:
                if not error.retryable:
                    raise
                if error.reason != told:  # the client looks for the broker, and comes back
                    told = error.reason
                    output.news(str(error))
                continue
            if not there:
                raise NotFound(
                    "no_such_agent",
                    f"{agent} is gone: it was unregistered by somebody else, or was idle for its "
                    "--ttl; `conductor status` names what went last",
                    agent=agent,
                )


def _admitted(
    conductor: Conductor,
    args: argparse.Namespace,
    options: RegisterOptions,
    output: Output,
    waiting: Waiting,
) -> AgentStatus | None:
    """REGISTER, with its news."""

    def tell(news: News) -> None:
        doing = _DOING.get(news.stage, f"{news.stage}:")
        total = f", {size(news.total)}" if news.total else ""
        waiting.now = f"{doing} {args.model}{total}"
        if news.note:
            output.news(news.note)

    model = model_argument(args.model, conductor.endpoint)
    return conductor.register(args.agent, model, on_progress=tell, **options).info


def _unregister(args: argparse.Namespace, output: Output) -> int:
    with connect(args) as conductor:
        conductor.unregister(args.agent, principal=args.principal)
    output.value({"unregistered": args.agent})
    output.text(f"{args.agent} is gone")
    return 0
