"""Where the broker is, and with which key, for whoever was not told."""

from __future__ import annotations

import os
from pathlib import Path

from vram_conductor.client.defaults import find_config
from vram_conductor.protocol.config import Config, client_endpoint, load_config, overlay
from vram_conductor.protocol.endpoints import Tcp, parse_endpoint
from vram_conductor.protocol.key_files import load_key
from vram_conductor.protocol.keys import KeyFile

KeyPath = str | os.PathLike[str]
"""Path of a key file."""

ENDPOINT_VARIABLE = "VRAM_CONDUCTOR_CLIENTS"


def default_endpoint() -> str:
    """``$VRAM_CONDUCTOR_CLIENTS``, else what the configuration file and the environment say,
    else the ipc socket in the runtime folder: where ``conductor up`` listens.

    Raises:
        InvalidArgument: ``bad_config``.
    """
    named = os.environ.get(ENDPOINT_VARIABLE)
    return named or client_endpoint(_configured().broker)


def key_for(endpoint: str, given: KeyPath | None) -> KeyFile | None:
    """The key to show to the broker at ``endpoint``: the file that was ``given``, else
    ``$VRAM_CONDUCTOR_CLIENT_KEY``, else the configuration's. None over ipc, which needs none.

    Raises:
        InvalidArgument: ``bad_config``, ``bad_endpoint``, ``bad_key_file``.
        NotFound: ``no_key_file``. FailedPrecondition: ``unsafe_key_file``, ``no_curve``.
    """
    if not isinstance(parse_endpoint(endpoint), Tcp):
        return None
    path = given or _configured().client.key
    return load_key(Path(path).expanduser()) if path else None


def _configured() -> Config:
    return overlay(load_config(find_config(None)), os.environ)
