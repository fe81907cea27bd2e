"""Whether the parts of a split model belong together, before llama.cpp sees them.

Every part is a GGUF: the first has the model's metadata, and each says which part it is
(``split.no``, from 0 on), how many there are (``split.count``) and how many tensors they have
together (``split.tensors.count``); llama.cpp's ``gguf-split`` writes them. Nothing in a part
names its model: a part of another quantisation of the same model can look right, and only the
digest of the whole tells.
"""

from __future__ import annotations

from pathlib import Path

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.split_files import PartName
from vram_conductor.worker.gguf_header import GgufHeader, read_header
from vram_conductor.worker.llama.ggufcheck import check_gguf
from vram_conductor.worker.llama.identity import ModelFiles
from vram_conductor.worker.llama.tensors import data_bytes


def check_files(files: ModelFiles) -> None:
    """Look at the beginning of every file; of a split model, at the headers.

    Raises:
        NotFound: ``no_such_model``: it cannot be read.
        InvalidArgument: ``bad_model``: no GGUF, or a corrupt one; ``wrong_model_part``: it does
            not belong where its name puts it.
    """
    for path, size in zip(files.paths, files.sizes, strict=True):
        check_gguf(path, size)
    if len(files.paths) > 1:
        _check_parts(files)


def _check_parts(files: ModelFiles) -> None:
    count = len(files.paths)
    owners: dict[str, str] = {}
    announced = 0
    for number, path in enumerate(files.paths):
        header = read_header(path)
        _check_place(path, header, number, count)
        _check_length(path, header, files.sizes[number])
        if number == 0:
            announced = _whole(header, "split.tensors.count")
        for tensor in header.tensors:
            other = owners.setdefault(tensor.name, path)
            if other != path:
                raise _wrong(
                    path, number, count, f"has the tensor {tensor.name}, as {_name(other)} does"
                )
    if len(owners) != announced:
        raise _wrong(
            files.paths[0],
            0,
            count,
            f"announces {announced} tensors, the {count} parts have {len(owners)}",
        )


def _check_place(path: str, header: GgufHeader, number: int, count: int) -> None:
    parts, place = _whole(header, "split.count"), _whole(header, "split.no")
    if parts <= 1:
        raise _wrong(path, number, count, "holds no part of a split model")
    if (parts, place) != (count, number):
        raise _wrong(path, number, count, f"holds part {place + 1} of {parts}")


def _check_length(path: str, header: GgufHeader, size: int) -> None:
    end = max((tensor.offset + data_bytes(tensor) for tensor in header.tensors), default=0)
    if header.data_offset + end > size and header.tensors:
        raise InvalidArgument(
            "bad_model",
            f"{path} is cut off: it has {size} bytes, its tensors end at byte "
            f"{header.data_offset + end}; get the file again",
            path=path,
            file_bytes=size,
        )


def misnamed(files: ModelFiles) -> InvalidArgument | None:
    """Why llama.cpp does not find the other parts of a model: the file's header says that there
    are some, its name does not. None where that is not what is wrong.

    Raises:
        NotFound, InvalidArgument: as ``read_header``.
    """
    path = files.paths[0]
    if len(files.paths) > 1:
        return None
    header = read_header(path)
    parts, place = _whole(header, "split.count"), _whole(header, "split.no")
    if parts <= 1:
        return None
    stem = Path(path).name.removesuffix(".gguf")
    right = PartName(stem, place + 1, parts).of(place + 1)
    return InvalidArgument(
        "wrong_model_part",
        f"{path} holds part {place + 1} of {parts} of a split model, which its name must say: "
        f"call it {right}, and the others likewise, in the same folder",
        path=path,
        part=place + 1,
        parts=parts,
    )


def _whole(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _name(path: str) -> str:
    return Path(path).name


def _wrong(path: str, number: int, count: int, what: str) -> InvalidArgument:
    return InvalidArgument(
        "wrong_model_part",
        f"{path} is named part {number + 1} of {count}, but {what}: parts of several models or "
        "several parts were mixed up; give each its own name back, or pull the model again",
        path=path,
        part=number + 1,
        parts=count,
    )
