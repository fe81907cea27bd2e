"""Which agents of a running broker use a model, for whoever is about to remove it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vram_conductor.client.cli_agents import connect
from vram_conductor.client.model_places import ModelPlaces
from vram_conductor.protocol.catalogue import CatalogueModel
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.status import AgentStatus

PATIENCE_S = 0.5
"""A broker that takes longer is not asked: removing files needs none."""


def registered(args: argparse.Namespace) -> Sequence[AgentStatus]:
    """The caller's agents; none where no broker says so quickly. Never raises for that."""
    try:
        with connect(args, connect_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as conductor:
            return conductor.list()
    except (ConductorError, OSError):
        return ()


def users(agents: Sequence[AgentStatus], entry: CatalogueModel, places: ModelPlaces) -> list[str]:
    """Names of those that were registered with it: by its name, or by its file."""
    names = {entry.name, entry.file, str(places.path(entry))}
    return sorted(agent.agent for agent in agents if agent.model in names)


def warning(name: str, agents: Sequence[str], *, pulled: bool) -> str:
    """What becomes of them. ``pulled``: a pull brings the file back. *Pure.*"""
    shown = ", ".join(agents[:5]) + (f" and {len(agents) - 5} more" if len(agents) > 5 else "")
    back = f"conductor models pull {name}" if pulled else f"conductor models add {name}"
    return (
        f"warning: {name} is used by {shown}: they go on until their worker starts anew, and "
        f"then need it back ({back})"
    )
