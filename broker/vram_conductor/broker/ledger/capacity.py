"""How many bytes a device may promise. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.broker.ledger.claims import check_bytes, check_range
from vram_conductor.protocol.config import DeviceConfig, parse_bytes
from vram_conductor.protocol.values import DeviceInfo, DeviceKind, LedgerMode

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The fixed facts of one device's ledger.

    Attributes:
        device: ``cuda:0``, ``cpu`` …
        kind: ``cuda`` or ``cpu``.
        mode: ``reserve``: all weights stay, pools take turns; ``timeshare``: models take turns.
        total_bytes: physical size (NVML total; cpu: the configured capacity).
        reserved_bytes: the driver's own reserve (NVML reserved; cpu: 0).
        capacity_bytes: configured upper bound; 0: none.
        admission_percent: share that may be promised, 1 to 100.
        host_cap_bytes: host memory for parked states and pinned backups.
        disk_cap_bytes: disk for spilled states.
        sample_max_age_ns: nothing is admitted on an older memory sample.

    Raises:
        InvalidArgument: ``bad_bytes``, ``bad_value``.
    """

    device: str
    kind: DeviceKind
    mode: LedgerMode
    total_bytes: int
    reserved_bytes: int = 0
    capacity_bytes: int = 0
    admission_percent: int = 100
    host_cap_bytes: int = 0
    disk_cap_bytes: int = 0
    sample_max_age_ns: int = 6_000 * NS_PER_MS

    def __post_init__(self) -> None:
        for name in (
            "total_bytes",
            "reserved_bytes",
            "capacity_bytes",
            "host_cap_bytes",
            "disk_cap_bytes",
        ):
            check_bytes(name, getattr(self, name))
        check_range("admission_percent", self.admission_percent, 1, 100)
        check_range("sample_max_age_ns", self.sample_max_age_ns, 1, 1 << 62)

    @property
    def cap_bytes(self) -> int:
        """(total - reserved), at most the configured capacity, × admission_percent / 100,
        rounded down."""
        size = max(0, self.total_bytes - self.reserved_bytes)
        if self.capacity_bytes:
            size = min(size, self.capacity_bytes)
        return size * self.admission_percent // 100

    @staticmethod
    def of(config: DeviceConfig, info: DeviceInfo | None, sample_max_age_ms: int) -> DeviceSpec:
        """From the configuration and the worker's READY. Without READY (``info`` None) a cpu
        device has its configured capacity, and a cuda device has none: it admits nothing.

        Raises:
            InvalidArgument: as the class, and ``bad_size``.
        """
        capacity_bytes = parse_bytes(config.capacity)
        known_bytes = capacity_bytes if config.kind == "cpu" else 0
        return DeviceSpec(
            device=config.id,
            kind=config.kind,
            mode=config.mode,
            total_bytes=info.total_bytes if info else known_bytes,
            reserved_bytes=info.reserved_bytes if info else 0,
            capacity_bytes=capacity_bytes,
            admission_percent=config.admission_percent,
            host_cap_bytes=parse_bytes(config.host_cap),
            sample_max_age_ns=sample_max_age_ms * NS_PER_MS,
        )
