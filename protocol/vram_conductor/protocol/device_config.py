"""One device in the configuration file."""

from __future__ import annotations

from typing import Literal

import msgspec

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.sizes import parse_bytes
from vram_conductor.protocol.values import DeviceKind, LedgerMode

SleepMode = Literal["auto", "off"]

_THREADS_MAX = 512  # GGML_MAX_N_THREADS of ggml.h; more ends the process


def _check_size(key: str, size: str | int) -> None:
    # msgspec adds the place in the file to a ValueError, and to no other.
    try:
        parse_bytes(size)
    except InvalidArgument as error:
        raise ValueError(f"{key}: {error.info.message}") from None


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device and its worker.

    Attributes:
        id: ``cuda:0``, ``cpu``, ``cpu:1`` …
        kind: ``cuda`` or ``cpu``.
        capacity: cpu: the bytes it may hand out. cuda: an upper bound below the card's size,
            or empty for the card's own. Where there is no NVML to measure the card, it is needed,
            and taken at its word.
        admission_percent: share of the capacity that may be promised.
        mode: ``reserve`` or ``timeshare``.
        host_cap: bytes of shared memory for parked states.
        pinned_cap: cuda: bytes of it that may be page-locked, for faster copies; 0: none. None:
            all of it.
        threads: CPU threads for compute, at most 512; 0 means all cores.
        n_ubatch: micro-batch in tokens; 0 means 512 on cuda, 64 on cpu.
        sleep: cuda: ``auto``: models that have to make room keep their addresses and sleep,
            where that can be done; ``off``: they are always unloaded and loaded again.
        managed: whether ``conductor up`` starts this device's worker itself.
    """

    id: str
    kind: DeviceKind
    capacity: str | int = 0
    admission_percent: int = 100
    mode: LedgerMode = "reserve"
    host_cap: str | int = "4 GiB"
    pinned_cap: str | int | None = None
    threads: int = 0
    n_ubatch: int = 0
    sleep: SleepMode = "auto"
    managed: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= _THREADS_MAX:
            raise ValueError(
                f"threads is {self.threads}; it must be 0 (all cores) to {_THREADS_MAX}"
            )
        if self.n_ubatch < 0:
            raise ValueError(
                f"n_ubatch is {self.n_ubatch}; it must not be negative (0: the default)"
            )
        for key in ("capacity", "host_cap", "pinned_cap"):
            if (size := getattr(self, key)) is not None:
                _check_size(key, size)
