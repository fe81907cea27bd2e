"""The configuration of somebody who has none: found in the usual places, or made from this box."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vram_conductor.protocol import config
from vram_conductor.protocol.config import Config, overlay, runtime_dir
from vram_conductor.protocol.errors import Unavailable
from vram_conductor.protocol.ipc_path import private_folder

_HEADER = """\
# Made by `conductor up` because no configuration file was given; it describes this box.
# Copy it to {home} and change what you like.
"""
CPU_SHARE = 4
"""Without a GPU, a quarter of the main memory may be promised to agents."""


def config_home() -> Path:
    """Where a user's own configuration file is looked for."""
    return config.config_home(os.environ)


def find_config(given: str | None) -> Path | None:
    """The file that was named, else ``$VRAM_CONDUCTOR_CONFIG``, else the user's own, else None."""
    return config.find_config(given, os.environ)


def gpu_indexes(dev: Path = Path("/dev")) -> list[int]:
    """Indexes of the NVIDIA devices of this box, by their device files."""
    names = (path.name.removeprefix("nvidia") for path in dev.glob("nvidia[0-9]*"))
    return sorted(int(name) for name in names if name.isdigit())


def default_text(gpus: list[int], memory_bytes: int) -> str:
    """A configuration for a box with these GPUs and this much main memory. *Pure.*"""
    share_mib = max(256, memory_bytes // CPU_SHARE >> 20)
    sections = [
        f'[[device]]\nid = "cuda:{index}"\nkind = "cuda"\nadmission_percent = 95\n'
        f'host_cap = "{share_mib} MiB"\n'
        for index in gpus
    ]
    if not gpus:
        sections = [
            f'[[device]]\nid = "cpu"\nkind = "cpu"\ncapacity = "{share_mib} MiB"\n'
            f'host_cap = "{share_mib} MiB"\n'
        ]
    return _HEADER.format(home=config_home()) + "\n" + "\n".join(sections)


def make_default() -> Path:
    """Write the default configuration into the runtime folder.

    Returns:
        The file's path.

    Raises:
        FailedPrecondition: ``unsafe_directory``: the runtime folder is open to others.
        Unavailable: ``runtime_dir_unusable``.
    """
    folder = runtime_dir(overlay(Config(), os.environ).broker)
    path = folder / "default.toml"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        private_folder(folder)
        # Whole or not at all: the children of a conductor that is up may read it just now.
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as part:
            part.write(default_text(gpu_indexes(), memory_bytes))
        Path(part.name).replace(path)
    except OSError as error:
        raise Unavailable(
            "runtime_dir_unusable",
            f"cannot write {path}: {error.strerror}; set XDG_RUNTIME_DIR or give a --config",
            path=str(path),
        ) from None
    return path
