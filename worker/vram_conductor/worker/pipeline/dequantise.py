"""Rows of a GGUF tensor as float32. *Pure.*

The block formats are those of https://github.com/ggml-org/ggml (ggml-common.h, ggml-quants.c);
all numbers are little-endian, d, m, dmin are float16:

- ``Q8_0`` (32 values, 34 bytes): d, 32 int8 q. Value d · q.
- ``Q4_0`` (32, 18): d, 16 bytes. Their low nibbles are q of values 0–15, their high ones of
  16–31. Value d · (q - 8).
- ``Q4_1`` (32, 20): d, m, nibbles as above. Value d · q + m.
- ``Q5_0`` (32, 22): d, 32 bits that are bit 4 of each q, nibbles as above. Value d · (q - 16).
- ``Q4_K`` (256, 144): d, dmin, 12 bytes with 8 scales and 8 offsets of 6 bits, then nibbles: of
  each 32 bytes, the low ones are 32 values and the high ones the next 32. Value
  d · scale · q - dmin · offset, with one scale and one offset per 32 values.
- ``Q6_K`` (256, 210): 128 bytes with bits 0–3 of q, 64 bytes with bits 4–5, 16 int8 scales, d.
  Value d · scale · (q - 32), with one scale per 16 values. Of each half of 128 values, 64 bytes
  of nibbles hold values 0–63 (low) and 64–127 (high), 32 bytes hold four times 2 bits for the
  values at +0, +32, +64, +96.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.tensor_types import TensorType

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]


def dequantise(data: Bytes, kind: TensorType, rows: int, columns: int) -> Values:
    """The values of ``rows`` rows, (rows, columns).

    Args:
        data: rows × columns / kind.block_values × kind.block_bytes bytes, contiguous.
    """
    blocks = data.reshape(rows * columns // kind.block_values, kind.block_bytes)
    return _FORMATS[kind](blocks).reshape(rows, columns)


def _f32(blocks: Bytes) -> Values:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Values:
    return blocks.view(np.float16).astype(np.float32)


def _half(blocks: Bytes, at: int) -> Values:
    """The float16 at byte ``at`` of each block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Values:
    """(…, n) bytes -> (…, 2 n): the low nibbles, then the high ones."""
    out = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.float32)
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4
    return out.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _q8_0(blocks: Bytes) -> Values:
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks, 0)
    return values


def _q4_0(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _half(blocks, 0)
    return values


def _q4_1(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 4:])
    values *= _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q5_0(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 6:])
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    values += high * np.float32(16)
    values -= 16
    values *= _half(blocks, 0)
    return values


def _q4_k(blocks: Bytes) -> Values:
    scales, offsets = _six_bits(blocks[:, 4:16])
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    values *= (_half(blocks, 0) * scales)[:, :, None]
    values -= (_half(blocks, 2) * offsets)[:, :, None]
    return values


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes -> 8 scales and 8 offsets.

    The first four of each are the low 6 bits of bytes 0–3 and 4–7. Of the others, bits 0–3 are
    the low (scale) and high (offset) nibbles of bytes 8–11, bits 4–5 the two bits left over in
    bytes 0–3 and 4–7.
    """
    first, second, nibbles = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.hstack((first & 63, (nibbles & 15) | (first >> 6 << 4)))
    offsets = np.hstack((second & 63, (nibbles >> 4) | (second >> 6 << 4)))
    return scales.astype(np.uint8, copy=False), offsets.astype(np.uint8, copy=False)


def _q6_k(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    values += (pairs >> shifts & 3) * np.float32(16)
    values -= 32
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    by_scale = values.reshape(-1, 16, 16)
    by_scale *= scales[:, :, None]
    return by_scale


_FORMATS: dict[TensorType, Callable[[Bytes], Values]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q6_K: _q6_k,
}
