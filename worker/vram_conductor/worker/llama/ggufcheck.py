"""A first look at a model file, before llama.cpp sees it.

Layout: "GGUF", version u32, tensors u64, key-values u64, then the key-value section, the tensor
infos and the aligned data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import stat
import struct
from pathlib import Path

from vram_conductor.protocol.errors import InvalidArgument, NotFound

HEADER_BYTES = 24
VERSIONS = (2, 3)
_TENSOR_INFO_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8
_KEY_VALUE_BYTES_MIN = 8 + 1 + 4 + 1


def check_gguf(path: str, file_bytes: int) -> None:
    """Look at the first 24 bytes.

    Raises:
        NotFound: ``no_such_model``: it cannot be read.
        InvalidArgument: ``bad_model``: not a GGUF, an unknown version, or counts that the file
            is too short for.
    """
    try:
        # Whoever opens a pipe waits for its other end.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise _unreadable(path, "it is no file")
        with Path(path).open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    except ValueError as error:
        # A path with a zero byte in it.
        raise _unreadable(path, str(error)) from None
    if header[:4] != b"GGUF":
        raise _bad(path, "is not a GGUF file", file_bytes)
    if len(header) < HEADER_BYTES:
        raise _bad(path, f"ends after {len(header)} bytes", file_bytes)
    version, tensors, pairs = struct.unpack("<4xIQQ", header)
    if int.from_bytes(header[4:8], "big") in VERSIONS:
        raise _bad(path, "is big-endian; files for little-endian machines are known", file_bytes)
    if version not in VERSIONS:
        raise _bad(path, f"has GGUF version {version}; versions 2 and 3 are known", file_bytes)
    least = HEADER_BYTES + tensors * _TENSOR_INFO_BYTES_MIN + pairs * _KEY_VALUE_BYTES_MIN
    if least > file_bytes:
        raise _bad(
            path,
            f"announces {tensors} tensors and {pairs} key-value pairs but has only "
            f"{file_bytes} bytes: it is truncated or corrupt",
            file_bytes,
        )


def _unreadable(path: str, why: object) -> NotFound:
    return NotFound("no_such_model", f"cannot read the model file {path}: {why}", path=path)


def _bad(path: str, what: str, file_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        "bad_model",
        f"{path} {what}; get the file again",
        path=path,
        file_bytes=file_bytes,
    )
