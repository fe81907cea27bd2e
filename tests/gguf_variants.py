"""A GGUF written again with something changed: what a file may hold that it should not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[Any] | tuple[NDArray[np.uint8], gguf.GGMLQuantizationType] | None]


def write_variant(
    source: Path,
    target: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Tensors | None = None,
) -> Path:
    """Write ``source`` to ``target`` with other values.

    ``metadata``: key → new value (bool, int, float, str, or a list of one of these); None leaves
    the key out. ``tensors``: name → new data, float32 or float16, or bytes with a ggml type; None
    leaves the tensor out. Keys and tensors that the source has not are added.
    """
    reader = gguf.GGUFReader(source)
    arch = str((metadata or {}).get("general.architecture") or _value(reader, "architecture"))
    writer = gguf.GGUFWriter(target, arch)
    kept = {
        name: (field.contents(), field.types)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    changed = {name: (value, _types(value)) for name, value in (metadata or {}).items()}
    for name, (value, types) in (kept | changed).items():
        if value is not None and name != "general.architecture":
            writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    weights: dict[str, Any] = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
    weights |= tensors or {}
    for name, entry in weights.items():
        if isinstance(entry, tuple):
            writer.add_tensor(name, entry[0], raw_dtype=entry[1])
        elif entry is not None:
            writer.add_tensor(name, entry)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(f"general.{key}")
    assert field is not None
    return field.contents()


def _types(value: Any) -> list[gguf.GGUFValueType]:
    if isinstance(value, list):
        return [gguf.GGUFValueType.ARRAY, *_types(value[0])]
    kinds = gguf.GGUFValueType
    for python, kind in ((bool, kinds.BOOL), (int, kinds.UINT32), (float, kinds.FLOAT32)):
        if isinstance(value, python):
            return [kind]
    return [kinds.STRING]
