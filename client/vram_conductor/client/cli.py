"""The ``conductor`` command: parsing, dispatch, exit codes."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from vram_conductor.client import (
    cli_agents,
    cli_bench,
    cli_conversations,
    cli_decode,
    cli_demo,
    cli_drain,
    cli_explain,
    cli_keys,
    cli_lease,
    cli_models,
    cli_run,
    doctor,
)
from vram_conductor.client.output import Output
from vram_conductor.client.supervisor import FINAL_EXIT_CODES
from vram_conductor.protocol.errors import Code, ConductorError, LedgerDeny
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DENIED = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_EXIT: dict[Code, int] = {
    Code.NOT_FOUND: 4,
    Code.ALREADY_EXISTS: 5,
    Code.UNAVAILABLE: 6,
    Code.DEADLINE_EXCEEDED: 6,
    Code.RESOURCE_EXHAUSTED: 7,
    Code.INVALID_ARGUMENT: 8,
    Code.OUT_OF_RANGE: 8,
    Code.PERMISSION_DENIED: 9,
    Code.UNAUTHENTICATED: 9,
}

_EPILOG = """\
exit codes:
  0 done                   4 not found         8 invalid input
  1 failed                 5 exists already    9 not allowed (key or role)
  2 wrong usage            6 nobody answers  130 interrupted (Ctrl-C)
  3 refused by the ledger  7 busy or full    143 terminated
  64-78: the broker or a worker cannot run (sysexits.h); `up` passes it on
an error ends with its reason in parentheses: conductor explain REASON

a first session:
  conductor models pull smollm2-135m
  conductor up                                    (in another terminal)
  conductor register coder --model smollm2-135m
  conductor decode coder "Write a haiku about memory." --max-tokens 60
  conductor status
"""


class StrictParser(argparse.ArgumentParser):
    """Flags in full only: a script that says ``--js`` would break when ``--jsonl`` comes."""

    def __init__(self, **options: Any) -> None:
        given: dict[str, Any] = {"allow_abbrev": False, **options}
        super().__init__(**given)

    def error(self, message: str) -> NoReturn:
        """One line of usage, of the command that was meant: what it cannot do without."""
        needed = [
            action for action in self._actions if action.required or not action.option_strings
        ]
        formatter = self._get_formatter()
        formatter.add_usage(None, needed, [])
        usage = " ".join(formatter.format_help().split())
        text = f"{usage}  (flags: {self.prog} --help)\n{self.prog}: error: {message}\n"
        self.exit(EXIT_USAGE, text)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - of its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Argparse lets the topmost parser complain of what the command's own does not know."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=16)


def parser() -> argparse.ArgumentParser:
    """The whole command line; every subcommand sets ``run`` to a function(args, output) → int."""
    top = StrictParser(
        prog="conductor",
        description="Run many LLM agents on one device that cannot hold them all.",
        epilog=_EPILOG,
        formatter_class=_formatter,
    )
    top.add_argument("--version", action="version", version=f"conductor {_version()}")
    _add_common(top, json=False, config=None)
    # Absent there, so that `conductor --json status` is as good as `conductor status --json`.
    common = argparse.ArgumentParser(add_help=False)
    _add_common(common, json=argparse.SUPPRESS, config=argparse.SUPPRESS)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        cli_run,
        cli_agents,
        cli_decode,
        cli_conversations,
        cli_lease,
        cli_drain,
        cli_keys,
        cli_models,
        doctor,
        cli_explain,
        cli_demo,
        cli_bench,
    ):
        module.add(commands, common)
    return top


def _version() -> str:
    try:
        return importlib.metadata.version("vram-conductor")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _add_common(to: argparse.ArgumentParser, *, json: bool | str, config: str | None) -> None:
    to.add_argument("--json", action="store_true", default=json, help="one JSON value on stdout")
    to.add_argument("--config", metavar="FILE", default=config, help="configuration file (TOML)")


def exit_code(error: ConductorError) -> int:
    """Exit status that a script sees for an error."""
    if isinstance(error, LedgerDeny):
        return EXIT_DENIED
    if error.reason == "broker_failed" and error.details.get("exit_code") in FINAL_EXIT_CODES:
        return int(error.details["exit_code"])
    return _EXIT.get(error.info.code, EXIT_FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    _open_missing()
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in cli_run.PARTS:
        # All flags, --help too, are the part's own; this does not return.
        cli_run.become(given[0], given[1:])
    if not given:
        parser().print_help()
        return EXIT_USAGE
    args = parser().parse_args(given)
    output = Output(json=args.json)
    # A kill is an exit like another: temporary files go, the broker hears BYE.
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        return int(args.run(args, output))
    except ConductorError as error:
        return _failed(output, error, args)
    except KeyboardInterrupt:
        output.news("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout is gone (`| head`): that is not a failure of ours. What is
        # still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Writing to a full stdout names no file.
        where = f": {error.filename}" if error.filename else ""
        output.news(f"conductor: {error.strerror}{where} (os_error)")
        return EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _open_missing() -> None:
    """Who closed stdout or stderr (``>&-``) wants to hear nothing; Python then has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def _failed(output: Output, error: ConductorError, args: argparse.Namespace) -> int:
    try:
        output.value({"error": error.info})
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    whom = getattr(args, "agent", "AGENT")
    if (
        conversation := getattr(args, "conversation", DEFAULT_CONVERSATION)
    ) != DEFAULT_CONVERSATION:
        whom += f" --conversation {conversation}"
    output.complain(error, args.command, whom)
    return exit_code(error)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
