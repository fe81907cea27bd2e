"""``python -m vram_conductor.worker.bench``: parts of the benches that need the worker's side."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vram_conductor.protocol.errors import ConductorError, ResourceExhausted
from vram_conductor.worker.bench.layers_command import add_verbs
from vram_conductor.worker.bench.memory import watch
from vram_conductor.worker.bench.random_models import make_random
from vram_conductor.worker.bench.random_shapes import find_shape
from vram_conductor.worker.bench.rates import COPY_BYTES, REPEATS, copy_rates
from vram_conductor.worker.memory import host_memory
from vram_conductor.worker.vram import NvmlSampler


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON value; an error is ``{"error": …}`` and exit code 1."""
    args = _parser().parse_args(argv)
    try:
        value = args.run(args)
    except ConductorError as error:
        value = {"error": error.info}
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        value = {"error": _no_memory(error).info}
    if value is not None:
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    return 1 if isinstance(value, dict) and "error" in value else 0


def _no_memory(error: MemoryError | OSError) -> ResourceExhausted:
    """Of a process that may not take as much as is free (``ulimit -v``)."""
    available_bytes = host_memory().available_bytes
    return ResourceExhausted(
        "host_memory_short",
        f"this process gets no more memory ({error or 'no size was said'}), with "
        f"{available_bytes} bytes available on the host: raise its limit (ulimit -v), or take less "
        "(fewer layers, sequences, tokens of context)",
        available_bytes=available_bytes,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vram_conductor.worker.bench", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    models = verbs.add_parser("models", help="make random-weight GGUFs")
    models.add_argument("sizes", nargs="+")
    models.add_argument("--folder", type=Path, required=True)
    models.set_defaults(run=_models)
    rates = verbs.add_parser("rates", help="copy rates of the hardware")
    rates.add_argument("--device", default="cpu")
    rates.add_argument("--bytes", type=int, default=COPY_BYTES)
    rates.add_argument("--repeats", type=int, default=REPEATS)
    rates.set_defaults(run=_rates)
    memory = verbs.add_parser("memory", help="memory in use, sampled until stdin ends")
    memory.add_argument("--device", default="cpu")
    memory.add_argument("--pid", type=int, default=0)
    memory.add_argument("--period-ms", type=int, default=50)
    memory.set_defaults(run=_memory)
    estimates = verbs.add_parser("estimates", help="estimates beside what loads then take")
    estimates.add_argument("--device", default="cpu")
    estimates.add_argument("--folder", type=Path, required=True)
    estimates.add_argument("--seconds", type=float, default=60.0)
    estimates.set_defaults(run=_estimates)
    pipeline = verbs.add_parser("pipeline", help="layers travel while others are computed")
    pipeline.add_argument("--device", default="cpu")
    pipeline.add_argument("--n-layers", type=int, default=0)
    pipeline.add_argument("--bytes-per-layer", type=int, default=0)
    pipeline.add_argument("--compute-iters", type=int, default=0)
    pipeline.add_argument("--slots", type=int, default=2)
    pipeline.add_argument("--repeats", type=int, default=5)
    pipeline.add_argument("--grid", action="store_true", help="many settings")
    pipeline.add_argument("--seconds", type=float, default=60.0, help="for the grid")
    pipeline.set_defaults(run=_pipeline)
    add_verbs(verbs)
    return parser


def _models(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for size in args.sizes:
        shape, path = find_shape(size), make_random(size, args.folder)
        found.append(
            {
                "size": size,
                "path": str(path.resolve()),
                "bytes": path.stat().st_size,
                "parameters": shape.parameters,
            }
        )
    return found


def _memory(args: argparse.Namespace) -> Any:
    return watch(args.device, args.pid, args.period_ms)


def _estimates(args: argparse.Namespace) -> Any:
    # The other verbs do without llama.cpp: what only watches a device loads nothing for it.
    from vram_conductor.worker.bench.estimates import measure_grid

    return measure_grid(args.device, args.folder, args.seconds)


def _pipeline(args: argparse.Namespace) -> Any:
    from vram_conductor.worker.bench.pipeline import measure_grid, measure_setting
    from vram_conductor.worker.bench.pipeline_payload import Shape

    if args.grid:
        return measure_grid(args.device, args.slots, args.repeats, args.seconds, _news)
    shape = Shape(args.n_layers, args.bytes_per_layer, args.slots)
    return measure_setting(args.device, shape, args.compute_iters, args.repeats)


def _news(text: str) -> None:
    """For who waits for the value, see the client's ``ask_worker``."""
    sys.stderr.write(f"news: {text}\n")
    sys.stderr.flush()


def _rates(args: argparse.Namespace) -> dict[str, Any]:
    """NVML and CUDA may number GPUs differently: this process is narrowed to the one meant."""
    if not args.device.startswith("cuda"):
        return copy_rates(args.device, args.bytes, args.repeats)
    sampler = NvmlSampler(args.device)
    os.environ["CUDA_VISIBLE_DEVICES"] = sampler.uuid
    sampler.close()
    return copy_rates("cuda:0", args.bytes, args.repeats) | {"device": args.device}


if __name__ == "__main__":
    # An end like another: what is half written is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
