"""Names and digests of models in several files."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.split_files import (
    PartName,
    combined_sha256,
    part_name,
    part_paths,
)
from vram_conductor.protocol.stamp import model_stamp, write_stamp


def stamp(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    write_stamp(path, digest, path.stat())
    return digest


@given(st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True), st.integers(2, 99_999), st.data())
def test_every_part_knows_all_the_others(prefix: str, count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, count))
    name = part_name(PartName(prefix, number, count).of(number))
    assert name is not None
    assert name == PartName(prefix, number, count)
    first = part_name(name.of(1))
    assert first is not None
    assert first.of(number) == name.of(number)


def test_the_parts_of_a_model_lie_beside_each_other() -> None:
    parts = [Path(f"/m/big-Q8_0-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    for part in parts:
        assert part_paths(part) == parts


@pytest.mark.parametrize(
    "file",
    [
        "model.gguf",
        "big-00001-of-00001.gguf",
        "big-00000-of-00003.gguf",
        "big-00004-of-00003.gguf",
        "big-1-of-3.gguf",
        "-00001-of-00003.gguf",
        "big-00001-of-00003.gguf.part",
        "big-00001-of-0000３.gguf",
    ],
)
def test_any_other_name_is_a_model_by_itself(file: str) -> None:
    assert part_name(file) is None
    assert part_paths(Path(file)) == [Path(file)]


def test_the_digest_can_be_had_with_common_tools(tmp_path: Path) -> None:
    first = tmp_path / "big-00001-of-00002.gguf"
    digests: list[str] = []
    for number, part in enumerate(part_paths(first)):
        part.write_bytes(b"part %d" % number)
        digests.append(hashlib.sha256(part.read_bytes()).hexdigest())
    shell = "sha256sum big-*-of-00002.gguf | cut -c1-64 | sha256sum"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert combined_sha256(digests) == done.stdout.decode().split()[0]
    assert combined_sha256(digests) != combined_sha256(digests[::-1])
    assert combined_sha256(digests[:1]) == digests[0]


def test_one_changed_part_ends_the_stamp_of_the_model(tmp_path: Path) -> None:
    first, second = part_paths(tmp_path / "big-00001-of-00002.gguf")
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    stamped = stamp(first)
    assert model_stamp(first) is None
    expected = combined_sha256([stamped, stamp(second)])
    assert model_stamp(first) == expected
    second.write_bytes(b"three")
    assert model_stamp(first) is None


def test_a_plain_file_keeps_its_own_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"all")
    assert model_stamp(path) is None
    assert stamp(path) == model_stamp(path)
