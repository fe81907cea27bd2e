"""The tensor list of a GGUF, and what of it lies on a GPU.

Only the names, shapes and types are read; the key-value section in front of them is skipped,
which takes 50 ms with a vocabulary of 262,000 tokens. llama.cpp has checked the file before.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as ll

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

CUDA_ALIGNMENT_BYTES = 128
CUDA_ROW_PADDING = 512
"""ggml-cuda pads the last row of a quantised matrix to this many elements."""

HOST_TENSORS = frozenset(
    {"per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"}
)
"""Input tensors, looked up row by row: llama.cpp keeps them on the host. (llama-arch.cpp,
LLM_TENSOR_LAYER_INPUT)"""

# ggml's own functions are found through libllama, which is linked to it: the shared objects beside
# it have other names in other builds.
_ggml = ll._lib

for _name in ("ggml_type_size", "ggml_blck_size", "ggml_is_quantized"):
    _function = getattr(_ggml, _name)
    _function.argtypes = [ctypes.c_int]
    _function.restype = {
        "ggml_type_size": ctypes.c_size_t,
        "ggml_blck_size": ctypes.c_int64,
        "ggml_is_quantized": ctypes.c_bool,
    }[_name]


@dataclass(frozen=True)
class Tensor:
    """One tensor: ``shape`` as in ggml, the row length first; ``kind`` is its ``ggml_type``."""

    name: str
    shape: tuple[int, ...]
    kind: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of so many elements, rounded up to whole blocks."""
        size = int(_ggml.ggml_type_size(self.kind))
        block = int(_ggml.ggml_blck_size(self.kind))
        return -(-elements // block) * size

    @property
    def bytes(self) -> int:
        return self.row_bytes(self.shape[0]) * math.prod(self.shape[1:])

    @property
    def cuda_bytes(self) -> int:
        """What ggml-cuda allocates for it, alignment included."""
        size = self.bytes
        ragged = self.shape[0] % CUDA_ROW_PADDING
        if ragged and _ggml.ggml_is_quantized(self.kind):
            size += self.row_bytes(CUDA_ROW_PADDING - ragged)
        return -(-size // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES


def read_tensors(path: str) -> list[Tensor]:
    """The tensors of a file that llama.cpp accepts."""
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        n_tensors, n_pairs = struct.unpack_from("<QQ", data, 8)
        at = 24
        for _ in range(n_pairs):
            at += 8 + _U64.unpack_from(data, at)[0]
            at = _skip_value(data, at + 4, _U32.unpack_from(data, at)[0])
        tensors = []
        for _ in range(n_tensors):
            length = _U64.unpack_from(data, at)[0]
            name = data[at + 8 : at + 8 + length].decode("utf-8", "replace")
            at += 8 + length
            n_dims = _U32.unpack_from(data, at)[0]
            shape = struct.unpack_from(f"<{n_dims}Q", data, at + 4)
            at += 4 + 8 * n_dims
            tensors.append(Tensor(name, shape, _U32.unpack_from(data, at)[0]))
            at += 12
        return tensors


def _skip_value(data: mmap.mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + int(_U64.unpack_from(data, at)[0])
    if kind != _ARRAY:
        return at + _SCALAR_BYTES[kind]
    item = _U32.unpack_from(data, at)[0]
    count = int(_U64.unpack_from(data, at + 4)[0])
    at += 12
    if item in _SCALAR_BYTES:
        return at + count * _SCALAR_BYTES[item]
    length_at = _U64.unpack_from
    for _ in range(count):
        at = _skip_value(data, at, item) if item == _ARRAY else at + 8 + int(length_at(data, at)[0])
    return at


def cuda_weights_bytes(tensors: Iterable[Tensor]) -> int:
    """Upper bound of the weights on a GPU that has every layer.

    The token embedding stays on the host; where the output is tied to it, a second copy serves
    as the output on the GPU.
    """
    found = list(tensors)
    untied = any(tensor.name == "output.weight" for tensor in found)
    host = HOST_TENSORS | ({"token_embd.weight"} if untied else set())
    return sum(tensor.cuda_bytes for tensor in found if tensor.name not in host)
