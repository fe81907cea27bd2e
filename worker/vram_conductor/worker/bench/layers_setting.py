"""What is measured of the layer pipeline. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vram_conductor.protocol.errors import InvalidArgument

BATCHES_CUDA = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES_CPU = (1, 2, 4, 8)

VALUED = (8, 64, 256)
"""Batches that are wanted most, after one and the largest."""

STEPS = 16
N_CTX_MIN = 32
"""A warm-up and the measured steps."""


@dataclass(frozen=True)
class LayersSetting:
    """A run.

    Attributes:
        batches: sequences that decode side by side, in rising order.
        window_layers, resident_layers: see ``LayerEngine.open``, which checks them.
        n_ctx: tokens of each sequence that the KV cache has room for.
        prompt_tokens: of the prefill.
        repeats: of the prefill.
        seconds: batches that do not fit into them are left out.
    """

    device: str
    path: str
    batches: Sequence[int]
    window_layers: int = 2
    resident_layers: int = 0
    n_ctx: int = 256
    prompt_tokens: int = 512
    repeats: int = 5
    seconds: float = 300.0
    steps: int = STEPS

    def __post_init__(self) -> None:
        """Raises InvalidArgument ``bad_value`` where a number makes no sense."""
        numbers: dict[str, tuple[Iterable[int], int]] = {
            "batch": (self.batches, 1),
            "n_ctx": ([self.n_ctx], N_CTX_MIN),
            "prompt_tokens": ([self.prompt_tokens], 1),
            "repeats": ([self.repeats], 1),
        }
        for name, (values, least) in numbers.items():
            for value in values:
                if value < least:
                    raise InvalidArgument(
                        "bad_value",
                        f"{name} is {value}; it must be {least} or more",
                        name=name,
                        value=value,
                    )

    @property
    def alone(self) -> list[int]:
        """Batches of one: an engine for them takes what an agent's does."""
        return [batch for batch in self.batches if batch == 1][:1]

    @property
    def together(self) -> list[int]:
        """The others, which share an engine, those first that are wanted most."""
        batches = {batch for batch in self.batches if batch > 1}
        first = [batch for batch in (max(batches, default=0), *VALUED) if batch in batches]
        return list(dict.fromkeys([*first, *sorted(batches)]))


def layers_setting(
    device: str,
    path: str,
    *,
    batches: Sequence[int] = (),
    window_layers: int = 2,
    resident_layers: int = 0,
    n_ctx: int = 0,
    prompt_tokens: int = 0,
    repeats: int = 0,
    seconds: float = 300.0,
) -> LayersSetting:
    """With what is right for this kind of device where nothing (or 0) is said.

    Raises:
        InvalidArgument: ``bad_value``.
    """
    cuda = device.startswith("cuda")
    return LayersSetting(
        device,
        path,
        tuple(batches) or (BATCHES_CUDA if cuda else BATCHES_CPU),
        window_layers,
        resident_layers,
        n_ctx or 256,
        prompt_tokens or (512 if cuda else 64),
        repeats or (5 if cuda else 2),
        seconds,
    )
