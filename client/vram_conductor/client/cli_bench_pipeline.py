"""Flags of ``conductor bench pipeline``: made-up layers, or a model's own."""

from __future__ import annotations

import argparse
from typing import Any

from vram_conductor.client.bench_pipeline import (
    BYTES_CPU,
    BYTES_CUDA,
    GRID_REPEATS,
    N_LAYERS,
    REPEATS,
)
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.sizes import parse_bytes

ABOUT = """\
While one layer is computed, the next one travels into another slot of the device. Measures what
that gains over one after the other, on the same memory, with made-up layers whose results are
checked. With --model or --random the layers are a model's, and the result is its logits. Without
a GPU (--device cpu) the same schedule runs on two threads.
"""

_ONE = ("n_layers", "bytes_per_layer", "compute_iters")
_MADE_UP = (*_ONE, "slots", "repeats", "grid")
_MODEL = ("batch", "window_layers", "resident", "threads")


def add_flags(verb: argparse.ArgumentParser) -> None:
    """All but those that every bench has. None: not given."""
    layers = verb.add_argument_group("made-up layers")
    layers.add_argument("--n-layers", type=int, metavar="N", help=f"default: {N_LAYERS}")
    layers.add_argument(
        "--bytes-per-layer", metavar="SIZE", help="default: 64MiB on cuda, 16MiB on cpu"
    )
    layers.add_argument(
        "--compute-iters",
        type=int,
        metavar="N",
        help="multiply-adds per value; 0 (default): so many that it takes as long as transfer",
    )
    layers.add_argument("--slots", type=int, metavar="N", help="2 (default) to 4")
    layers.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"rounds; times are their medians (default: {REPEATS}; of a grid {GRID_REPEATS})",
    )
    layers.add_argument(
        "--grid",
        action="store_true",
        default=None,
        help="many settings, from transfer-bound to compute-bound",
    )
    model = verb.add_argument_group("a model's layers")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="FILE", help="a GGUF file")
    which.add_argument("--random", metavar="SIZE", help="a random-weight model, e.g. 1.2B")
    model.add_argument("--batch", type=int, metavar="N", help="sequences at once, at most")
    model.add_argument("--window-layers", type=int, metavar="N", help="slots: 2 (default) to 4")
    model.add_argument(
        "--resident", type=int, metavar="N", help="layers that stay on the device (default: 0)"
    )
    model.add_argument(
        "--threads", type=int, default=None, metavar="N", help="cpu: compute threads; 0: all"
    )


def extra(args: argparse.Namespace, *, on_cuda: bool) -> dict[str, Any]:
    """What the bench is told beyond what all benches are; also fills in ``args.models`` and
    ``args.threads``.

    Raises:
        InvalidArgument: ``bad_size``, ``bad_value``; ``not_together``: flags of both kinds.
    """
    with_model = args.model is not None or args.random is not None
    _check_kind(args, with_model)
    if args.random is not None and "," in args.random:
        raise InvalidArgument("bad_value", f"--random {args.random}: take one size, such as 1.2B")
    args.models = None if args.model is None else [args.model]
    args.threads = args.threads or 0
    if with_model:
        return {
            "batch": args.batch,
            "window_layers": 2 if args.window_layers is None else args.window_layers,
            "resident_layers": 0 if args.resident is None else args.resident,
        }
    usual = BYTES_CUDA if on_cuda else BYTES_CPU
    usual_repeats = GRID_REPEATS if args.grid else REPEATS
    return {
        "n_layers": N_LAYERS if args.n_layers is None else args.n_layers,
        "bytes_per_layer": usual
        if args.bytes_per_layer is None
        else parse_bytes(args.bytes_per_layer),
        "compute_iters": args.compute_iters or 0,
        "slots": 2 if args.slots is None else args.slots,
        "repeats": args.repeats if args.repeats is not None else usual_repeats,
        "grid": bool(args.grid),
    }


def _check_kind(args: argparse.Namespace, with_model: bool) -> None:
    """Raises InvalidArgument ``not_together``."""
    if with_model:
        _refuse(args, _MADE_UP, "for made-up layers only: leave out --model and --random")
    else:
        _refuse(args, _MODEL, "for a model's layers only: name one with --model or --random")
    if args.grid:
        _refuse(args, _ONE, "for one setting only: a grid has its own, leave out --grid")


def _refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise InvalidArgument("not_together", f"{', '.join(given)}: {why}", flags=given)
