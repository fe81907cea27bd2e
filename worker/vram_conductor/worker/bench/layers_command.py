"""The verbs of the layer pipeline's bench on a model: the pipeline, and llama.cpp beside it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vram_conductor.protocol.errors import InvalidArgument


def add_verbs(verbs: Any) -> None:
    """Register them with an ArgumentParser's subparsers."""
    layers = verbs.add_parser("layers", help="a model whose layers travel")
    _common(layers)
    layers.add_argument("--batches", default="", help="1,2,4 …")
    layers.add_argument("--window-layers", type=int, default=2)
    layers.add_argument("--resident", type=int, default=0)
    layers.add_argument("--repeats", type=int, default=0)
    layers.add_argument("--reference", type=Path, help="folder that layers-text wrote")
    layers.add_argument("--describe", action="store_true", help="only look at the file")
    layers.set_defaults(run=_layers)
    text = verbs.add_parser("layers-text", help="llama.cpp's logits of a text")
    text.add_argument("--model", required=True)
    text.add_argument("--threads", type=int, default=0)
    text.add_argument("--positions", type=int, default=0)
    text.add_argument("--seconds", type=float, default=300.0)
    text.add_argument("--folder", type=Path, required=True)
    text.set_defaults(run=_text)
    beside = verbs.add_parser("layers-beside", help="how fast llama.cpp is")
    _common(beside)
    beside.add_argument("--threads", type=int, default=0)
    beside.add_argument("--batches", required=True, help="1:BYTES,2:BYTES … on the GPU")
    beside.add_argument("--partial", action="store_true", help="as many layers as fit into BYTES")
    beside.set_defaults(run=_beside)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", required=True)
    parser.add_argument("--n-ctx", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0)


def _layers(args: argparse.Namespace) -> Any:
    from vram_conductor.worker.bench.layers import describe, measure_layers
    from vram_conductor.worker.bench.layers_setting import layers_setting

    setting = layers_setting(
        args.device,
        args.model,
        batches=_numbers(args.batches),
        window_layers=args.window_layers,
        resident_layers=args.resident,
        n_ctx=args.n_ctx,
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeats,
        seconds=args.seconds,
    )
    if args.describe:
        return {"setting": setting, "model": describe(setting)}
    return measure_layers(setting, args.reference)


def _text(args: argparse.Namespace) -> Any:
    from vram_conductor.worker.bench.llama_text import write_reference

    return write_reference(args.model, args.threads, args.positions, args.folder, args.seconds)


def _beside(args: argparse.Namespace) -> Any:
    from vram_conductor.worker.bench.llama_reference import measure_reference

    batches = [_numbers(part.replace(":", ",")) for part in args.batches.split(",")]
    return measure_reference(
        args.model,
        args.device,
        args.threads,
        [(numbers[0], numbers[-1]) for numbers in batches if numbers],
        n_ctx=args.n_ctx,
        prompt_tokens=args.prompt_tokens,
        seconds=args.seconds,
        partial=args.partial,
    )


def _numbers(text: str) -> list[int]:
    """``1,2,4``.

    Raises:
        InvalidArgument: ``bad_value``.
    """
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidArgument(
            "bad_value", f"{text!r} are no numbers; write them like 1,2,4", text=text
        ) from None
