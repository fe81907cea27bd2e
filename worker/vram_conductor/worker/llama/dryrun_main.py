"""The child of ``isolated``: answers requests until its standard input closes."""

from __future__ import annotations

import os
import struct
import sys

import msgspec

from vram_conductor.protocol.errors import ConductorError, Internal
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.isolated import Answer, Ask
from vram_conductor.worker.llama.options import EngineOptions


def answer(runner: DryRunner, ask: Ask) -> Answer:
    """One request; every failure becomes an error answer."""
    try:
        if ask.shape is None:
            return Answer(info=runner.describe(ask.path, ask.name))
        return Answer(
            estimate=runner.estimate(ask.path, ask.name, ask.shape, ask.n_ctx, ask.fit_bytes)
        )
    except ConductorError as error:
        return Answer(error=error.info)
    except Exception as error:
        return Answer(error=Internal("estimate_failed", f"the dry run failed: {error!r}").info)


def main() -> None:
    """Serve frames from fd 0 to what was fd 1; stray prints go to standard error."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    os.nice(5)  # streams go first
    requests = os.fdopen(0, "rb")
    runner = DryRunner(msgspec.json.decode(sys.argv[1], type=EngineOptions))
    while header := requests.read(4):
        body = requests.read(struct.unpack("<I", header)[0])
        reply = msgspec.msgpack.encode(answer(runner, msgspec.msgpack.decode(body, type=Ask)))
        replies.write(struct.pack("<I", len(reply)) + reply)


if __name__ == "__main__":
    main()
