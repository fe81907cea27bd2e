"""What a decoded value (JSON, MessagePack, TOML) is. *Pure.*

``isinstance`` says as much, but leaves a type checker without a word on what is inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def is_map(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_array(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """A list, or a tuple, which is written as one."""
    return isinstance(value, list | tuple)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """A map of any class."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """A list of any class; a text is one, too."""
    return isinstance(value, Sequence)
