"""``conductor demo``."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``demo``."""
