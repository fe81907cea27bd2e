"""A GGUF's tensors as they lie in the file, quantised, for the layer pipeline.

Nothing is read but the header until somebody asks for a tensor's bytes. They are read, not mapped:
whoever touches a mapping of a file that was cut off meanwhile is killed (SIGBUS).
What the pipeline cannot compute (an architecture, a tensor type) is refused at once, by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import DataLoss, InvalidArgument, Unimplemented
from vram_conductor.worker.gguf_header import GgufHeader, TensorInfo, Value, read_header
from vram_conductor.worker.pipeline.tensor_types import Tensor, TensorType

__all__ = ["ARCHITECTURES", "GgufTensors", "Tensor", "TensorType"]

ARCHITECTURES = ("llama", "qwen2", "gemma3")
"""Values of ``general.architecture`` whose forward pass is known."""


_OTHER_TYPES = {
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Names for refusals."""


class GgufTensors:
    """One open file.

    Attributes:
        path: of the file.
        metadata: key → value; arrays longer than a thousand items (vocabularies) are left out.
        tensors: name → tensor, in the file's order.
        n_bytes: size of the file.
    """

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        metadata: dict[str, Value],
        tensors: dict[str, Tensor],
        n_bytes: int,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.n_bytes = n_bytes
        self._file: BinaryIO | None = file

    @classmethod
    def open(cls, path: str | Path) -> GgufTensors:
        """Read the header.

        Raises:
            NotFound: ``no_such_model``.
            InvalidArgument: ``bad_model`` (not a GGUF, corrupt), ``split_model``.
            Unimplemented: ``unsupported_architecture``, ``unsupported_tensor``.
            DataLoss: ``truncated_model``: a tensor's data lies beyond the file's end.
        """
        path = Path(path)
        header = read_header(str(path))
        _check_split(path, header)
        _check_architecture(path, header)
        tensors = [_tensor(path, info, header.data_offset) for info in header.tensors]
        _check_apart(path, tensors, header.alignment)
        file = path.open("rb", buffering=0)
        try:
            n_bytes = os.fstat(file.fileno()).st_size
            _check_complete(path, tensors, n_bytes)
            named = {tensor.name: tensor for tensor in tensors}
            return cls(path, file, header.metadata, named, n_bytes)
        except BaseException:
            file.close()
            raise

    def read(self, name: str, first: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` (n,), contiguous, with the tensor's bytes from byte ``first`` on. Several
        threads may read at once.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the file was closed.
            DataLoss: ``truncated_model``: it was cut off meanwhile; ``unreadable_model``.
        """
        if self._file is None:
            raise ValueError(f"{self.path} was closed")
        at, left = self.tensors[name].offset + first, out.data
        while left:
            try:
                count = os.preadv(self._file.fileno(), [left], at)
            except OSError as error:
                raise DataLoss(
                    "unreadable_model",
                    f"{self.path} cannot be read any more: {error.strerror}",
                    path=str(self.path),
                    tensor=name,
                ) from None
            if not count:
                raise self._cut_off(name, os.fstat(self._file.fileno()).st_size)
            at, left = at + count, left[count:]

    def data(self, name: str) -> NDArray[np.uint8]:
        """All bytes of a tensor, (n_bytes,). Raises as :meth:`read`."""
        out = np.empty(self.tensors[name].n_bytes, np.uint8)
        self.read(name, 0, out)
        return out

    def close(self) -> None:
        """More than once is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _cut_off(self, name: str, file_bytes: int) -> DataLoss:
        return DataLoss(
            "truncated_model",
            f"{self.path} has {file_bytes} bytes, and had {self.n_bytes} when it was opened: "
            f"tensor {name} is cut off; get the file again, and replace it by renaming, not by "
            "writing over it",
            path=str(self.path),
            tensor=name,
            file_bytes=file_bytes,
            opened_bytes=self.n_bytes,
        )


def _check_split(path: Path, header: GgufHeader) -> None:
    count = header.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        number = header.metadata.get("split.no", 0)
        shard = f"shard {int(number) + 1} of {count}" if isinstance(number, int) else "one shard"
        raise InvalidArgument(
            "split_model",
            f"{path} is {shard} (split.count is {count}) and the layer pipeline reads whole "
            "files: join them with `llama-gguf-split --merge FIRST_SHARD OUTPUT.gguf`",
            path=str(path),
            split_count=count,
        )


def _check_architecture(path: Path, header: GgufHeader) -> None:
    arch, kind = (header.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if kind not in (None, "model"):
        raise Unimplemented(
            "unsupported_architecture",
            f"{path} is of the type {kind!r} (general.type), no model: name the model's own file",
            path=str(path),
            type=kind,
        )
    if arch not in ARCHITECTURES:
        raise Unimplemented(
            "unsupported_architecture",
            f"{path} has the architecture {arch!r}; the layer pipeline computes "
            f"{', '.join(ARCHITECTURES)}",
            path=str(path),
            architecture=arch,
            supported=list(ARCHITECTURES),
        )


def _tensor(path: Path, info: TensorInfo, data_offset: int) -> Tensor:
    try:
        kind = TensorType(info.kind)
    except ValueError:
        known = [kind.name for kind in TensorType]
        name = _OTHER_TYPES.get(info.kind, f"ggml type {info.kind}")
        raise Unimplemented(
            "unsupported_tensor",
            f"{path}: tensor {info.name} is {name}; there are kernels for {', '.join(known)}: "
            "take another quantisation of this model, such as Q4_K_M, Q4_0 or Q8_0",
            path=str(path),
            tensor=info.name,
            type=name,
            supported=known,
        ) from None
    columns, *rest = info.shape
    if math.prod(rest[1:]) != 1:
        raise Unimplemented(
            "unsupported_tensor",
            f"{path}: tensor {info.name} has the shape {list(info.shape)}; the layer pipeline "
            "computes with vectors and matrices (a stack of matrices is a mixture of experts)",
            path=str(path),
            tensor=info.name,
            shape=list(info.shape),
        )
    rows = rest[0] if rest else 1
    if rows == 0 or columns == 0 or columns % kind.block_values:
        raise InvalidArgument(
            "bad_model",
            f"{path}: tensor {info.name} has {rows} rows of {columns} values, where there must be "
            f"some, in whole blocks of {kind.block_values} ({kind.name}); get the file again",
            path=str(path),
            tensor=info.name,
        )
    return Tensor(info.name, kind, rows, columns, data_offset + info.offset)


def _check_apart(path: Path, tensors: Iterable[Tensor], alignment: int) -> None:
    """A damaged offset would give the weights of another tensor."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset % alignment:
            what = f"begins at byte {tensor.offset}, no multiple of {alignment}"
        elif tensor.offset < end:
            what = f"begins at byte {tensor.offset}, within tensor {before}, which ends at {end}"
        else:
            end, before = tensor.offset + tensor.n_bytes, tensor.name
            continue
        raise InvalidArgument(
            "bad_model",
            f"{path} is corrupt: tensor {tensor.name} {what}; get the file again",
            path=str(path),
            tensor=tensor.name,
        )


def _check_complete(path: Path, tensors: Iterable[Tensor], n_bytes: int) -> None:
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.n_bytes, default=None)
    if last is None:
        raise InvalidArgument("bad_model", f"{path} has no tensors; get the file again")
    needed = last.offset + last.n_bytes
    if needed > n_bytes:
        details: dict[str, Any] = {"file_bytes": n_bytes, "needed_bytes": needed}
        raise DataLoss(
            "truncated_model",
            f"{path} is truncated: tensor {last.name} ends at byte {needed}, the file after "
            f"{n_bytes} ({needed - n_bytes} bytes are missing); get the file again",
            path=str(path),
            tensor=last.name,
            **details,
        )
