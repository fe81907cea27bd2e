"""The model catalogue and the stamps of model files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vram_conductor.protocol.catalogue import (
    CatalogueModel,
    HubSource,
    PathSource,
    WheelSource,
    load_catalogue,
    model_path,
    packaged_catalogue,
    parse_catalogue,
)
from vram_conductor.protocol.catalogue_files import CatalogueFiles
from vram_conductor.protocol.config import WorkerConfig
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.split_files import combined_sha256
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


PARTS = ("1" * 64, "2" * 64)
SPLIT = f"""
[[model]]
name = "big"
file = "big-00001-of-00002.gguf"
sha256 = "{combined_sha256(PARTS)}"
size = 30
source = {{ kind = "huggingface", repo = "owner/big-GGUF", revision = "v1.0", files = [
  {{ path = "q8/big-00001-of-00002.gguf", sha256 = "{PARTS[0]}", size = 10 }},
  {{ path = "q8/big-00002-of-00002.gguf", sha256 = "{PARTS[1]}", size = 20 }},
] }}
"""


def test_packaged_catalogue_has_the_models_of_tests_and_demo() -> None:
    catalogue = load_catalogue()
    assert catalogue.names()[:2] == ["smollm2-135m", "gemma3-270m"]
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
        (("tiny.gguf", "ti\\u0000ny.gguf"), "plain file name"),
        (("tiny.gguf", "ti\\u001b[2Jny.gguf"), "plain file name"),
        (('"tiny"', '"ti ny"'), "letters"),
        ((SHA, "AB" * 32), "sha256"),
        (("size = 10", "size = 0"), "size"),
        (("size = 10", "size = 10\nn_ctx = 0"), "n_ctx"),
        (("size = 10", "sice = 10"), "sice"),
        (("a/b", "../b"), "member"),
        (("a/b", "/b"), "member"),
        (('"p"', '"--log"'), "no package"),
        (('"1"', '"-1"'), "no package"),
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


def test_a_split_model_of_the_hub() -> None:
    (entry,) = parse_catalogue(SPLIT.encode(), "here").model
    assert isinstance(entry.source, HubSource)
    assert [file.size for file in entry.source.files] == [10, 20]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("owner/big-GGUF", "owner"), "owner/name"),
        (("owner/big-GGUF", "owner/../x"), "owner/name"),
        (("v1.0", "-v1"), "branch or a tag"),
        (('of-00002.gguf"\nsha', 'of-00003.gguf"\nsha'), "has 3 parts, source.files 2"),
        (("q8/big-00002", "../big-00002"), "path inside the repository"),
        (("q8/big-00002", "q8\\u0000/big-00002"), "path inside the repository"),
        ((PARTS[1], "x" * 64), "needs its sha256"),
        (("size = 20", "size = 0"), "needs its sha256"),
        (("size = 20", "size = 21"), "size is not the sum"),
        ((PARTS[1], "3" * 64), "sha256 is not that"),
    ],
)
def test_what_is_wrong_with_a_hub_source_is_named(change: tuple[str, str], word: str) -> None:
    text = SPLIT.replace(*change)
    assert text != SPLIT
    with pytest.raises(InvalidArgument, match=word):
        parse_catalogue(text.encode(), "here")


@pytest.mark.parametrize("path", ["", "a\0b", "\udcff.gguf"])
def test_a_path_that_no_catalogue_can_hold(path: str) -> None:
    entry = CatalogueModel(name="mine", file="mine.gguf", source=PathSource(path=path))
    assert (entry.problem() or "").startswith("source.path")


def test_a_split_model_cannot_come_from_wheels() -> None:
    text = GOOD.replace("tiny.gguf", "tiny-00001-of-00002.gguf")
    with pytest.raises(InvalidArgument, match="cannot come from wheels"):
        parse_catalogue(text.encode(), "here")


# --- which files ------------------------------------------------------------------------------


def own(tmp_path: Path) -> tuple[CatalogueFiles, Path]:
    files = CatalogueFiles(WorkerConfig(), {"XDG_CONFIG_HOME": str(tmp_path)})
    assert files.own == tmp_path / "vram-conductor" / "models.toml"
    files.own.parent.mkdir()
    return files, files.own


def test_the_users_own_catalogue_goes_before_the_packaged_one(tmp_path: Path) -> None:
    files, path = own(tmp_path)
    packaged = load_catalogue().names()
    assert files.load().names() == packaged
    path.write_text(GOOD + GOOD.replace('"tiny"', '"smollm2-135m"'))
    merged = files.load()
    assert merged.names() == ["tiny", "smollm2-135m", *packaged[1:]]
    hidden = merged.find("smollm2-135m")
    assert hidden is not None
    assert hidden.size == 10
    assert files.of(path).names() == ["tiny", "smollm2-135m"]
    path.unlink()
    assert files.load().names() == packaged


def test_a_catalogue_that_is_set_is_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "set.toml"
    files = CatalogueFiles(WorkerConfig(catalogue=str(path)), {"XDG_CONFIG_HOME": str(tmp_path)})
    with pytest.raises(InvalidArgument, match="cannot read"):
        files.load()
    path.write_text(GOOD + '[[model]]\nname="m"\nfile="m"\nsource={kind="path", path="sub/m.gguf"}')
    assert files.own == path
    tiny, mine = files.load().model
    assert tiny.name == "tiny"
    assert isinstance(mine.source, PathSource)
    assert mine.source.path == str(tmp_path / "sub" / "m.gguf")


def test_while_a_file_is_broken_the_last_good_one_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, path = own(tmp_path)
    path.write_text(GOOD)
    assert "tiny" in files.latest().names()
    path.write_text("[[model]]\nname = 5\n")
    assert "tiny" in files.latest().names()
    assert "tiny" in files.latest().names()
    assert len(caplog.records) == 1, "said once"
    with pytest.raises(InvalidArgument):
        files.load()
    path.write_text(GOOD.replace('"tiny"', '"other"'))
    assert "other" in files.latest().names()


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
