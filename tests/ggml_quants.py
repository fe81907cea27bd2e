"""How the installed llama.cpp rounds activations before it multiplies them with a quantised matrix:
its own functions, out of its library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

_Q8_K = np.dtype([("d", "<f4"), ("q", "i1", 256), ("sums", "<i2", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
_Q8_1 = np.dtype([("d", "<f2"), ("sum", "<f2"), ("q", "i1", 32)])
_FORMATS = {"q8_0": _Q8_0, "q8_1": _Q8_1, "q8_K": _Q8_K}
"""Of https://github.com/ggml-org/ggml (ggml-common.h)."""


def rounded(x: Values, grid: str) -> Values:
    """``x`` as it is after ``quantize_row_<grid>``, in floats again.

    Args:
        grid: q8_0, q8_1 (blocks of 32 values) or q8_K (256).
    """
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-cpu.so"))
    format_ = _FORMATS[grid]
    blocks = np.zeros(x.size // format_["q"].shape[0], format_)
    given = np.ascontiguousarray(x, np.float32)
    library[f"quantize_row_{grid}"](
        ctypes.c_void_p(given.ctypes.data),
        ctypes.c_void_p(blocks.ctypes.data),
        ctypes.c_int64(x.size),
    )
    values: Values = blocks["q"] * blocks["d"].astype(np.float32)[:, None]
    return values.reshape(x.shape)
