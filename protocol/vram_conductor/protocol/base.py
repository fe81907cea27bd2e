"""What every message has in common. *Pure.*"""

from __future__ import annotations

import msgspec


class Base(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t"):
    """Common base; subclasses are tagged with their wire name."""
