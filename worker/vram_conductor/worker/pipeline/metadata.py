"""The metadata of one architecture: ``{arch}.KEY``, with types checked. *Pure.*"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from vram_conductor.protocol.errors import InvalidArgument, Unimplemented

Scalar = bool | int | float | str


class Metadata:
    """Keys of a GGUF. A list with the same value for each layer counts as that value.

    Attributes:
        arch: ``general.architecture``.
    """

    def __init__(self, path: str, values: Mapping[str, object]) -> None:
        self._path = path
        self._values = values
        self.arch = str(values.get("general.architecture"))

    def scalar(self, key: str, default: Scalar | None = None) -> Scalar:
        """The value of ``{arch}.key``.

        Raises:
            InvalidArgument: ``bad_model``: it is missing and has no default.
            Unimplemented: ``unsupported_feature``: it differs from layer to layer.
        """
        value = self._values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise self.bad(key, "missing")
        if isinstance(value, list) and value:
            each = cast(list[object], value)
            if any(item != each[0] for item in each):
                raise self.unsupported(key, "a value that differs from layer to layer")
            value = each[0]
        if not isinstance(value, Scalar):
            raise self.bad(key, f"{value!r}")
        return value

    def natural(self, key: str, default: int | None = None) -> int:
        """A whole number from 0. Raises as :meth:`scalar`."""
        value = self.scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.bad(key, f"{value!r}, not a whole number from 0")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number from 1. Raises as :meth:`scalar`."""
        value = self.natural(key, default)
        if not value:
            raise self.bad(key, "0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number from 0. Raises as :meth:`scalar`."""
        value = self.scalar(key, default)
        if isinstance(value, bool | str) or not math.isfinite(value) or value < 0:
            raise self.bad(key, f"{value!r}, not a finite number from 0")
        return float(value)

    def refuse(self, key: str) -> None:
        """Let it be absent or 0 only.

        Raises:
            Unimplemented: ``unsupported_feature``.
        """
        value = self._values.get(f"{self.arch}.{key}")
        if value not in (None, 0, 0.0, False, []):
            raise self.unsupported(key, f"{value!r}")

    def bad(self, key: str, what: str) -> InvalidArgument:
        """The error of an impossible value."""
        return InvalidArgument(
            "bad_model",
            f"{self._path}: {self.arch}.{key} is {what}; get the file again",
            path=self._path,
            key=f"{self.arch}.{key}",
        )

    def unsupported(self, key: str, what: str) -> Unimplemented:
        """The error of a value that is not handled: its logits would be wrong."""
        return Unimplemented(
            "unsupported_feature",
            f"{self._path}: {self.arch}.{key}: {what}, which the layer pipeline does not compute; "
            "take another model, or run this one through an agent",
            path=self._path,
            key=f"{self.arch}.{key}",
        )
