"""The ``conductor`` command: parsing, dispatch, exit codes.

Exit codes: 0 done; 1 something failed; 2 wrong usage; 3 refused by the ledger; 4 not found;
5 exists already; 6 nobody answers; 7 busy or full, try later; 8 invalid input; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from vram_conductor.client import cli_agents, cli_demo, cli_models, cli_run, doctor
from vram_conductor.client.output import Output
from vram_conductor.protocol.errors import Code, ConductorError, LedgerDeny

EXIT_FAILED = 1
EXIT_DENIED = 3
EXIT_INTERRUPTED = 130

_EXIT: dict[Code, int] = {
    Code.NOT_FOUND: 4,
    Code.ALREADY_EXISTS: 5,
    Code.UNAVAILABLE: 6,
    Code.DEADLINE_EXCEEDED: 6,
    Code.RESOURCE_EXHAUSTED: 7,
    Code.INVALID_ARGUMENT: 8,
    Code.OUT_OF_RANGE: 8,
}

_EPILOG = """\
exit codes: 0 done, 1 failed, 2 usage, 3 refused by the ledger, 4 not found, 5 exists,
            6 nobody answers, 7 busy or full, 8 invalid input, 130 interrupted

a first session:
  conductor models pull smollm2-135m
  conductor up --config configs/cpu.toml          (in another terminal)
  conductor register coder --model smollm2-135m --n-ctx 1024
  conductor decode coder "Write a haiku about memory."
  conductor status
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line; every subcommand sets ``run`` to a function(args, output) → int."""
    top = argparse.ArgumentParser(
        prog="conductor",
        description="Run many LLM agents on one device that cannot hold them all.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON value on stdout")
    common.add_argument("--config", metavar="FILE", help="configuration file (TOML)")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (cli_run, cli_agents, cli_models, doctor, cli_demo):
        module.add(commands, common)
    return top


def exit_code(error: ConductorError) -> int:
    """Exit status that a script sees for an error."""
    if isinstance(error, LedgerDeny):
        return EXIT_DENIED
    return _EXIT.get(error.info.code, EXIT_FAILED)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parser().parse_args(argv)
    output = Output(json=getattr(args, "json", False))
    try:
        return int(args.run(args, output))
    except ConductorError as error:
        if output.json:
            output.value({"error": msgspec.to_builtins(error.info)})
        output.complain(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout is gone (`| head`): that is not a failure of ours.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
