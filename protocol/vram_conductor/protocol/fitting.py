"""What of a model would fit, and where: FIT and its answer. *Pure.*"""

from __future__ import annotations

from typing import Literal

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.check import check_name, check_range, check_rid, check_text
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.values import KVType, LedgerMode

KV_TYPES: tuple[KVType, ...] = ("f16", "q8_0", "q4_0")
"""The KV types that are tried, the most exact first."""


FitLimit = Literal["", "training", "device", "host", "quota", "protocol"]


class Fit(Base, frozen=True, kw_only=True, tag="FIT"):
    """Ask how large a context one more agent of a model could have now, beside all that is
    promised. Promises nothing, loads nothing.

    Attributes:
        model, slots: as in REGISTER.
        device: only this one; None: every device.
    """

    rid: bytes
    model: str
    device: str | None = None
    slots: int = 1


class FitRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One KV type on one device; sizes in bytes, of an agent with ``n_ctx``.

    Attributes:
        n_ctx: the largest context that REGISTER would admit, in tokens: what the model was trained
            with, or less, to a multiple of 256; 0: none.
        limit: what keeps it from being larger: the model's ``training``, what the ``device`` or
            the ``host`` memory for parked states has left, the principal's ``quota``, this
            ``protocol``; empty where nothing fits.
        pool_cells, pool_slots: of the pool that it would share with the model's other agents.
        weights_bytes, kv_bytes, compute_bytes, recurrent_bytes, scratch_bytes: what the model and
            that pool take on the device, whoever else has a share in it.
        state_bytes: of its parked state, in host memory.
        requested_bytes: what would be promised beyond what is promised already.
        free_bytes: what the device could still promise afterwards.
        shares_weights: the weights are promised there already.
        error: where nothing fits: what REGISTER would answer, with the smallest context if the
            context is what is too large.
    """

    device: str
    kv_type: KVType
    n_ctx: int = 0
    limit: FitLimit = ""
    pool_cells: int = 0
    pool_slots: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    recurrent_bytes: int = 0
    scratch_bytes: int = 0
    state_bytes: int = 0
    requested_bytes: int = 0
    free_bytes: int = 0
    shares_weights: bool = False
    error: ErrorInfo | None = None


class FitDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ledger of a device that was asked about, as of the answer; in bytes.

    Attributes:
        mode: as in the configuration: in ``reserve`` mode all weights are promised at once.
        cap_bytes: the most that may be promised.
        promised_bytes: is promised; ``base_bytes`` and ``leases_bytes`` are in it.
        foreign_bytes: what others use of the device.
        free_bytes: cap - promised - foreign, at least 0.
        agents: how many it has.
        host_cap_bytes, host_promised_bytes: of the host memory for parked states.
    """

    device: str
    mode: LedgerMode = "reserve"
    cap_bytes: int = 0
    promised_bytes: int = 0
    base_bytes: int = 0
    leases_bytes: int = 0
    foreign_bytes: int = 0
    free_bytes: int = 0
    agents: int = 0
    host_cap_bytes: int = 0
    host_promised_bytes: int = 0


class FitReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to FIT.

    Attributes:
        model, slots: as asked.
        arch, file_bytes, n_ctx_train: of the file, as in ModelInfo; 0 or empty: not known.
        devices: their ledgers.
        rows: by device, then KV type.
    """

    model: str
    slots: int = 1
    arch: str = ""
    file_bytes: int = 0
    n_ctx_train: int = 0
    devices: list[FitDevice] = []
    rows: list[FitRow] = []


def check_fit(message: Fit) -> None:
    """Names and slots, as REGISTER's.

    Raises:
        InvalidArgument: ``bad_rid``, ``bad_name``, ``bad_value``.
        OutOfRange: ``limit_exceeded``.
    """
    check_rid(message.rid)
    check_text("model", message.model, limits.MODEL_CHARS_MAX, empty=False, printable=True)
    if message.device is not None:
        check_name("device", message.device)
    check_range("slots", message.slots, 1, limits.SLOTS_MAX)
