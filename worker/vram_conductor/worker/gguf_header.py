"""What a GGUF says about itself: metadata and the list of its tensors, without their data.

Arrays with more than :data:`ARRAY_ITEMS_MAX` items (vocabularies, merges) are skipped, not kept:
262,000 tokens take 23 ms, where the ``gguf`` package takes 9 s to make objects of them. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.protocol.errors import Internal, InvalidArgument
from vram_conductor.worker.llama.ggufcheck import HEADER_BYTES, check_gguf

ARRAY_ITEMS_MAX = 1024
"""Per-layer values are kept: no model has so many layers."""

DIMENSIONS_MAX = 4

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as listed: ``shape`` in ggml's order, the row length first; ``kind`` is its
    ``ggml_type``; ``offset`` in bytes from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Everything in front of the data.

    Attributes:
        metadata: key → value; long arrays are left out.
        data_offset: where the data begins in the file, in bytes.
        alignment: of every tensor, in bytes; a power of two.
    """

    metadata: dict[str, Value]
    tensors: list[TensorInfo]
    data_offset: int
    alignment: int


def read_header(path: str) -> GgufHeader:
    """Read it.

    Raises:
        NotFound: ``no_such_model``.
        InvalidArgument: ``bad_model``: not a GGUF, or one that ends or is corrupt in its header.
        Internal: ``load_failed``: the system cannot map it now.
    """
    try:
        file_bytes = Path(path).stat().st_size
    except (OSError, ValueError):
        # The check says why.
        file_bytes = 0
    check_gguf(path, file_bytes)
    with _mapped(path) as data:
        reader = _Reader(data)
        try:
            return reader.header()
        except (struct.error, OverflowError, ValueError) as error:
            raise InvalidArgument(
                "bad_model",
                f"{path} is truncated or corrupt: its header cannot be read at byte {reader.at} "
                f"of {file_bytes} ({error}); get the file again",
                path=path,
                file_bytes=file_bytes,
                at=reader.at,
            ) from None


def _mapped(path: str) -> mmap.mmap:
    try:
        with Path(path).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise Internal(
            "load_failed",
            f"cannot read the header of {path}: {error}; free memory, then try again",
            retryable=True,
            path=path,
        ) from None


class _Reader:
    """A cursor. What is out of bounds or unknown is a ValueError, or one of struct's errors."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = HEADER_BYTES

    def header(self) -> GgufHeader:
        n_tensors, n_pairs = struct.unpack_from("<QQ", self._data, 8)
        metadata: dict[str, Value] = {}
        for _ in range(n_pairs):
            key = self._string()
            value = self._value(self._take(_U32))
            if value is not None:
                metadata[key] = value
        tensors = [self._tensor() for _ in range(n_tensors)]
        if len({tensor.name for tensor in tensors}) < n_tensors:
            raise ValueError("two tensors have the same name")
        alignment = metadata.get("general.alignment", 32)
        # True is an int, too.
        whole = 0 if isinstance(alignment, bool) or not isinstance(alignment, int) else alignment
        if whole <= 0 or whole & (whole - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        return GgufHeader(metadata, tensors, -(-self.at // whole) * whole, whole)

    def _take(self, one: struct.Struct) -> int:
        value = one.unpack_from(self._data, self.at)[0]
        self.at += one.size
        return int(value)

    def _string(self) -> str:
        length = self._take(_U64)
        if self.at + length > len(self._data):
            raise ValueError(f"a string of {length} bytes goes beyond the end")
        self.at += length
        return self._data[self.at - length : self.at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Value | None:
        if kind != _ARRAY:
            return self._scalar(kind)
        item, count = self._take(_U32), self._take(_U64)
        if count <= ARRAY_ITEMS_MAX:
            return [self._scalar(item) for _ in range(count)]
        if item == _STRING:
            self._skip_strings(count)
        else:
            self.at += count * self._known(item).size
        return None

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        one = self._known(kind)
        value: Scalar = one.unpack_from(self._data, self.at)[0]
        self.at += one.size
        return value

    def _known(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ValueError(f"there is no value type {kind}")
        return _SCALARS[kind]

    def _skip_strings(self, count: int) -> None:
        at, length_at, data = self.at, _U64.unpack_from, self._data
        for _ in range(count):
            at += 8 + int(length_at(data, at)[0])
        self.at = at

    def _tensor(self) -> TensorInfo:
        name, n_dims = self._string(), self._take(_U32)
        if not 1 <= n_dims <= DIMENSIONS_MAX:
            raise ValueError(f"tensor {name} has {n_dims} dimensions")
        shape = tuple(self._take(_U64) for _ in range(n_dims))
        return TensorInfo(name, shape, self._take(_U32), self._take(_U64))
