"""``conductor models fit`` of a model that is not here yet: from the headers that the hub has."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.client.hub_outline import BEGINNINGS_BYTES, outline
from vram_conductor.client.output import Output
from vram_conductor.client.text import size
from vram_conductor.protocol.catalogue import CatalogueModel, HubSource
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.fitting import FitReport

NOT_PULLED = "model_not_pulled"


def fit_unpulled(
    source: HubSource, entry: CatalogueModel, ask: Callable[[str], FitReport], output: Output
) -> FitReport:
    """Ask about the headers of the hub's files.

    Args:
        ask: FIT about the model at a path of this machine.

    Raises:
        ConductorError: what the hub and the broker say; InvalidArgument ``bad_model``: not even
            the largest beginning has the whole header.
    """
    output.news(f"{entry.name} is not here: asking the hub for the headers of {size(entry.size)}")
    with outline(source, output.news, output.progress) as found:
        for most in BEGINNINGS_BYTES:
            found.fetch(most)
            try:
                return ask(str(found.path))
            except InvalidArgument as error:
                whole = all(file.size <= most for file in source.files)
                if error.reason != "bad_model" or whole or most == BEGINNINGS_BYTES[-1]:
                    raise
        raise AssertionError("it was asked about the last one")
