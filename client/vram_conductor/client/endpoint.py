"""Where the broker is, for whoever was not told."""

from __future__ import annotations

import os

from vram_conductor.client.defaults import find_config
from vram_conductor.protocol.config import client_endpoint, load_config, overlay

ENDPOINT_VARIABLE = "VRAM_CONDUCTOR_CLIENTS"


def default_endpoint() -> str:
    """``$VRAM_CONDUCTOR_CLIENTS``, else what the configuration file and the environment say,
    else the ipc socket in the runtime folder: where ``conductor up`` listens.

    Raises:
        InvalidArgument: ``bad_config``.
    """
    named = os.environ.get(ENDPOINT_VARIABLE)
    if named:
        return named
    return client_endpoint(overlay(load_config(find_config(None)), os.environ).broker)
