"""Configuration file (TOML) shared by broker, workers and the command line.

Precedence: flags > environment (``VRAM_CONDUCTOR_<SECTION>_<KEY>``) > file > defaults. Unknown
keys are errors. Sizes are ints in bytes or strings such as ``"8 GiB"``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.device_config import DeviceConfig as DeviceConfig
from vram_conductor.protocol.device_config import SleepMode as SleepMode
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.sizes import parse_bytes as parse_bytes
from vram_conductor.protocol.values import KVType

LanesMode = Literal["auto", "inline", "threads"]


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker. Empty endpoints mean ipc sockets in the runtime directory.

    Attributes:
        orphan_ms: how long a running job outlives its lost session. None: ORPHAN_MS where the
            client may come back, and not at all where its process is known to have ended (ipc).
        resume_ms: how long a worker that lost its connection is waited for, with what it was
            doing; 0: not at all.
        worker_wait_ms: how long REGISTER waits for a device whose worker is away; 0: not at all.
        lease_wait_ms: how long a lease may wait until agents have made room for it.
        builds: library builds whose workers are taken, as STATUS names them, or without what
            follows the ``+`` (``llama-cpp-python-0.3.36``); empty: all.
        keys_dir: folder of the keys; empty: ``keys`` in the state folder. Where there are keys,
            tcp endpoints ask for one.
    """

    clients: str = ""
    workers: str = ""
    runtime_dir: str = ""
    state_dir: str = ""
    keys_dir: str = ""
    metrics_port: int = 0
    default_n_ctx: int = 4096
    default_kv_type: KVType = "f16"
    worker_inflight: int = 8
    builds: list[str] = []
    queued_jobs_max: int = limits.QUEUED_JOBS_MAX
    queued_jobs_per_agent_max: int = limits.QUEUED_JOBS_PER_AGENT_MAX
    result_keep_ms: int = limits.RESULT_KEEP_MS
    orphan_ms: int | None = None
    resume_ms: int = limits.RESUME_MS
    heartbeat_ms: int = limits.HEARTBEAT_MS
    worker_wait_ms: int = 15_000
    lease_wait_ms: int = 30_000
    estimate_timeout_ms: int = 30_000
    load_timeout_ms: int = 600_000
    drain_ms: int = 10_000
    sample_max_age_ms: int = 6_000


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all workers share.

    Attributes:
        arena_dir: folder for parked states; empty: see :func:`arena_dir`.
        model_dirs: folders from which a path may be loaded.
        models_dir: the catalogue's cache; empty: ``$XDG_CACHE_HOME/vram-conductor/models``.
        catalogue: path of ``models.toml``; empty: the user's own before the packaged one.
        sample_ms: period of the memory sample.
        hang_ms: exit when the engine is busy and makes no step for this long.
        drain_ms: how long running jobs may go on after SIGTERM. A broker that has the worker leave
            says so itself.
        lanes: ``threads``: models compute side by side, and beside what is moved; ``inline``: one
            thing at a time; ``auto``: threads on cuda, inline on cpu, where models would only
            take each other's cores.
        verify_digest: hash model files at first load.
        key: key file that the worker shows to a broker over tcp; empty: none.
    """

    arena_dir: str = ""
    model_dirs: list[str] = []
    models_dir: str = ""
    catalogue: str = ""
    sample_ms: int = 2_000
    hang_ms: int = 60_000
    drain_ms: int = 2_000
    lanes: LanesMode = "auto"
    verify_digest: bool = True
    key: str = ""


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients and the command line share.

    Attributes:
        key: key file that is shown to a broker over tcp; empty: none.
    """

    key: str = ""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    broker: BrokerConfig = BrokerConfig()
    worker: WorkerConfig = WorkerConfig()
    client: ClientConfig = ClientConfig()
    device: list[DeviceConfig] = []

    def __post_init__(self) -> None:
        ids = [device.id for device in self.device]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"two devices have the id {twice[0]!r}; give each an id of its own")


def load_config(path: Path | None) -> Config:
    """Read a configuration file; None gives the defaults.

    Raises:
        InvalidArgument: ``bad_config``: unreadable, not TOML, unknown key, wrong type.
    """
    if path is None:
        return Config()
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise InvalidArgument("bad_config", f"cannot read {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidArgument("bad_config", f"{path}: {error}") from None


def config_home(env: Mapping[str, str]) -> Path:
    """Where a user's own configuration file is looked for."""
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    base = env.get("XDG_CONFIG_HOME")
    return (Path(base) if base else home / ".config") / "vram-conductor" / "conductor.toml"


CONFIG_HELP = (
    "configuration (TOML); default: $VRAM_CONDUCTOR_CONFIG, else "
    "~/.config/vram-conductor/conductor.toml if it is there"
)
"""What ``--config`` says of :func:`find_config`."""


def find_config(given: str | None, env: Mapping[str, str]) -> Path | None:
    """The file that was named, else ``$VRAM_CONDUCTOR_CONFIG``, else the user's own, else None."""
    if named := given or env.get("VRAM_CONDUCTOR_CONFIG"):
        return Path(named)
    own = config_home(env)
    return own if own.exists() else None


def runtime_dir(config: BrokerConfig) -> Path:
    """Folder of the ipc sockets (created with mode 0700 by the broker)."""
    if config.runtime_dir:
        return Path(config.runtime_dir)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "vram-conductor" if base else Path(f"/tmp/vram-conductor-{os.getuid()}")


def state_dir(config: BrokerConfig) -> Path:
    """Folder of the journal."""
    if config.state_dir:
        return Path(config.state_dir)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "vram-conductor"


def keys_dir(config: BrokerConfig) -> Path:
    """Folder of the keys."""
    return Path(config.keys_dir) if config.keys_dir else state_dir(config) / "keys"


def models_dir(config: WorkerConfig) -> Path:
    """Folder of the pulled models."""
    if config.models_dir:
        return Path(config.models_dir)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vram-conductor" / "models"


def arena_dir(config: Config) -> Path:
    """Folder of the parked states; in shared memory, so that they outlive a worker.

    Without ``worker.arena_dir`` it is ``/dev/shm/vram-conductor-UID``, and for an instance with a
    ``broker.runtime_dir`` of its own, ``/dev/shm/vram-conductor-UID-<digest of that folder>``:
    two instances never share it by accident.
    """
    if config.worker.arena_dir:
        return Path(config.worker.arena_dir)
    base = f"/dev/shm/vram-conductor-{os.getuid()}"
    if config.broker.runtime_dir:
        own = Path(config.broker.runtime_dir).resolve()
        base += "-" + hashlib.blake2b(os.fsencode(own), digest_size=4).hexdigest()
    return Path(base)


def client_endpoint(config: BrokerConfig) -> str:
    """Where clients connect."""
    return config.clients or f"ipc://{runtime_dir(config) / 'clients.ipc'}"


def worker_endpoint(config: BrokerConfig) -> str:
    """Where workers connect."""
    return config.workers or f"ipc://{runtime_dir(config) / 'workers.ipc'}"


ENV_PREFIX = "VRAM_CONDUCTOR_"
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "broker": BrokerConfig,
    "worker": WorkerConfig,
    "client": ClientConfig,
}


def overlay(
    config: Config,
    env: Mapping[str, str],
    flags: Mapping[str, Mapping[str, object]] | None = None,
) -> Config:
    """``config`` with the environment laid over it, and the flags over both.

    Args:
        config: what the file says (or the defaults).
        env: the process environment. ``VRAM_CONDUCTOR_BROKER_*``, ``VRAM_CONDUCTOR_WORKER_*``
            and ``VRAM_CONDUCTOR_CLIENT_*`` count, and ``VRAM_CONDUCTOR_DEVICE_SLEEP`` for every
            device; other names are somebody else's. Lists are separated by ``:``; an empty
            variable is as good as none.
        flags: ``{"broker": {"state_dir": "/var/lib/x"}}``; a None value was not given.

    Raises:
        InvalidArgument: ``bad_config``: an unknown key or a wrong type; the message names the
            variable or the flag.
    """
    given: dict[str, list[tuple[str, str, object]]] = {section: [] for section in _SECTIONS}
    sleep = env.get(f"{ENV_PREFIX}DEVICE_SLEEP")
    given["device"] = [(f"{ENV_PREFIX}DEVICE_SLEEP", "sleep", sleep)] if sleep else []
    for name in sorted(env):
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if name.startswith(ENV_PREFIX) and section in _SECTIONS and env[name]:
            given[section].append((name, key, env[name]))
    for section, values in (flags or {}).items():
        for key, value in values.items():
            if value is not None:
                given[section].append((f"--{key.replace('_', '-')}", key, value))
    parts = {section: _override(getattr(config, section), given[section]) for section in _SECTIONS}
    devices = [_override(device, given["device"]) for device in config.device]
    return msgspec.structs.replace(config, **parts, device=devices)


def _override(base: msgspec.Struct, given: list[tuple[str, str, object]]) -> msgspec.Struct:
    types = {field.name: field.type for field in msgspec.structs.fields(base)}
    for source, key, value in given:
        if key not in types:
            raise InvalidArgument(
                "bad_config", f"{source}: unknown key {key!r}; known: {', '.join(types)}", key=key
            )
        if isinstance(value, str) and isinstance(getattr(base, key), list):
            value = value.split(os.pathsep)
        try:
            converted = msgspec.convert(value, types[key], strict=False)
        except msgspec.ValidationError as error:
            raise InvalidArgument("bad_config", f"{source}={value}: {error}", key=key) from None
        base = msgspec.structs.replace(base, **{key: converted})
    return base
