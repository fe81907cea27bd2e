"""The tensor list of a GGUF, and what of it lies on a GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass

from llama_cpp import llama_cpp as ll

from vram_conductor.worker.gguf_header import TensorInfo, read_header
from vram_conductor.worker.llama.binding import shared_object

CUDA_ALIGNMENT_BYTES = 128
CUDA_ROW_PADDING = 512
"""ggml-cuda pads the last row of a quantised matrix to this many elements."""

HOST_TENSORS = frozenset(
    {"per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"}
)
"""Input tensors, looked up row by row: llama.cpp keeps them on the host. (llama-arch.cpp,
LLM_TENSOR_LAYER_INPUT)"""

_ggml = shared_object

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


def data_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor's data, of any file; 0 where its type is none, which is llama.cpp's to
    refuse."""
    known = 0 <= info.kind < ll.GGML_TYPE_COUNT and int(_ggml.ggml_blck_size(info.kind)) > 0
    return Tensor(info.name, info.shape, info.kind).bytes if known else 0


def read_tensors(*paths: str) -> list[Tensor]:
    """The tensors of a model that llama.cpp accepts, from all of its files."""
    found = [info for path in paths for info in read_header(path).tensors]
    return [Tensor(info.name, info.shape, info.kind) for info in found]


def cuda_weights_bytes(tensors: Iterable[Tensor]) -> int:
    """Upper bound of the weights on a GPU that has every layer.

    The token embedding stays on the host; where the output is tied to it, a second copy serves
    as the output on the GPU.
    """
    found = list(tensors)
    untied = any(tensor.name == "output.weight" for tensor in found)
    host = HOST_TENSORS | ({"token_embd.weight"} if untied else set[str]())
    return sum(tensor.cuda_bytes for tensor in found if tensor.name not in host)
