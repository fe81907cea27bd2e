"""The user's own catalogue file: what is written is read again, and the rest stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client.own_catalogue import OwnCatalogue, entry_text, is_bad, without
from vram_conductor.protocol.catalogue import (
    CatalogueModel,
    HubFile,
    HubSource,
    PathSource,
    WheelPart,
    WheelSource,
    parse_catalogue,
)
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument, Unavailable
from vram_conductor.protocol.split_files import combined_sha256

NAMES = st.text("abcXYZ019._:@-", min_size=1, max_size=12)
# Whatever a hub may answer; a lone surrogate cannot come in UTF-8.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SHA = st.text("0123456789abcdef", min_size=64, max_size=64)
PATHS = st.text("ab c'\"\\#[]é", min_size=1, max_size=9).map(lambda text: f"x/{text}.gguf")


@st.composite
def entries(draw: st.DrawFn) -> CatalogueModel:
    name = draw(NAMES)
    said: dict[str, Any] = {key: draw(TEXT) for key in ("licence", "licence_url", "notice")}
    n_ctx, gated = draw(st.none() | st.integers(1, 1 << 20)), draw(st.booleans())
    match draw(st.sampled_from(["path", "wheel", "hub"])):
        case "path":
            source = PathSource(path=draw(TEXT.filter(lambda text: text and "\0" not in text)))
            return CatalogueModel(
                name=name, file="a.gguf", source=source, n_ctx=n_ctx, gated=gated, **said
            )
        case "wheel":
            part = WheelPart(package="p", version="1", member=draw(PATHS))
            files = [HubFile(path="", sha256=draw(SHA), size=draw(st.integers(1, 1 << 40)))]
            wheel = WheelSource(parts=[part])
            return _whole(name, "a.gguf", wheel, files, n_ctx, gated, said)
        case _:
            count = draw(st.integers(1, 3))
            files = [
                HubFile(path=draw(PATHS), sha256=draw(SHA), size=draw(st.integers(1, 1 << 40)))
                for _ in range(count)
            ]
            file = "a.gguf" if count == 1 else f"a-00001-of-{count:05d}.gguf"
            hub = HubSource(repo="o/r", revision="v1", files=files)
            return _whole(name, file, hub, files, n_ctx, gated, said)


def _whole(
    name: str,
    file: str,
    source: WheelSource | HubSource,
    files: list[HubFile],
    n_ctx: int | None,
    gated: bool,
    said: dict[str, Any],
) -> CatalogueModel:
    return CatalogueModel(
        name=name,
        file=file,
        source=source,
        sha256=combined_sha256([part.sha256 for part in files]),
        size=sum(part.size for part in files),
        n_ctx=n_ctx,
        gated=gated,
        **said,
    )


@given(entries())
def test_what_is_written_is_read_again(entry: CatalogueModel) -> None:
    assert parse_catalogue(entry_text(entry).encode(), "here").model == [entry]


@given(st.lists(entries(), min_size=1, max_size=4, unique_by=lambda entry: entry.name), st.data())
def test_taking_one_out_leaves_the_others(
    models: list[CatalogueModel], data: st.DataObject
) -> None:
    text = "# mine\n" + "# between\n".join(map(entry_text, models))
    gone = data.draw(st.sampled_from(models))
    left = without(text, gone.name, "here")
    assert parse_catalogue(left.encode(), "here").model == [m for m in models if m != gone]
    assert left.count("#") >= text.count("#") - entry_text(gone).count("#")


def path_entry(name: str, notice: str = "") -> CatalogueModel:
    return CatalogueModel(
        name=name, file=f"{name}.gguf", source=PathSource(path=f"/{name}"), notice=notice
    )


@pytest.fixture
def own(tmp_path: Path) -> OwnCatalogue:
    return OwnCatalogue(tmp_path / "deep" / "models.toml")


def names(own: OwnCatalogue) -> list[str]:
    return parse_catalogue(own.path.read_bytes(), "here").names()


def test_put_and_drop(own: OwnCatalogue) -> None:
    assert not own.drop("a")
    own.put(path_entry("a"))
    assert own.path.read_text().startswith("# Models of your own")
    own.put(path_entry("b"))
    own.put(path_entry("a", notice="new"))
    assert names(own) == ["b", "a"]
    assert own.drop("b")
    assert names(own) == ["a"]
    assert sorted(path.name for path in own.path.parent.iterdir()) == ["models.toml"]
    for _ in range(3):
        own.put(path_entry("b"))
        assert own.drop("b")
    assert "\n\n\n" not in own.path.read_text(), "no blank lines pile up"


def test_what_a_user_wrote_stays(own: OwnCatalogue) -> None:
    own.path.parent.mkdir()
    mine = (
        '# first\n\n  [[ model ]]   # odd, but TOML\nname="x"\nfile = "x"\nsource.kind = "path"\n'
    )
    mine += 'source.path = "x"\n# of the next\n'
    own.path.write_text(mine)
    own.path.chmod(0o600)
    own.put(path_entry("a"))
    assert own.path.read_text().startswith(mine.rstrip())
    assert own.path.stat().st_mode & 0o777 == 0o600
    assert own.drop("x")
    assert own.path.read_text().startswith("# first\n")
    assert "# of the next\n" in own.path.read_text()
    assert names(own) == ["a"]


def test_a_header_inside_a_string_is_none(own: OwnCatalogue) -> None:
    own.path.parent.mkdir()
    own.path.write_text(
        '[[model]]\nname = "a"\nfile = "a"\nnotice = """\n[[model]]\nname = "b"\n"""\n'
        'source = { kind = "path", path = "a" }\n' + entry_text(path_entry("b"))
    )
    assert names(own) == ["a", "b"]
    assert own.drop("b")
    assert names(own) == ["a"]
    assert '[[model]]\nname = "b"' in own.path.read_text()


def test_what_cannot_be_taken_out_is_left_to_its_author(own: OwnCatalogue) -> None:
    own.path.parent.mkdir()
    text = 'model = [{ name = "a", file = "a", source = { kind = "path", path = "a" } }]\n'
    own.path.write_text(text)
    with pytest.raises(FailedPrecondition) as caught:
        own.drop("a")
    assert caught.value.reason == "catalogue_by_hand"
    with pytest.raises(InvalidArgument):
        own.put(path_entry("b"))  # TOML does not let anything be appended to it
    assert own.path.read_text() == text


def test_a_link_stays_a_link(own: OwnCatalogue, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("")
    own.path.parent.mkdir()
    own.path.symlink_to(real)
    own.put(path_entry("a"))
    assert own.path.is_symlink()
    assert "a.gguf" in real.read_text()


def test_a_folder_that_cannot_be(own: OwnCatalogue) -> None:
    own.path.parent.write_text("a file")
    with pytest.raises(Unavailable) as caught:
        own.put(path_entry("a"))
    assert caught.value.reason == "catalogue_unusable"


def test_a_full_disk_leaves_the_old_file(
    own: OwnCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.put(path_entry("a"))
    before = own.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(Unavailable, match="No space left"):
        own.put(path_entry("b"))
    assert own.path.read_bytes() == before
    assert [path.name for path in own.path.parent.iterdir()] == ["models.toml"]


def test_additions_at_the_same_time_are_all_there(own: OwnCatalogue) -> None:
    threads = [
        threading.Thread(target=own.put, args=[path_entry(f"m{index}")]) for index in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names(own)) == [f"m{index}" for index in range(8)]


@given(
    st.lists(entries(), max_size=3, unique_by=lambda entry: entry.name).filter(
        lambda models: all(entry.name != "bad" for entry in models)
    ),
    st.integers(0, 3),
    st.sampled_from(['file = "a\\u0000b"', "file = 5", 'colour = "red"', ""]),
)
def test_a_bad_entry_can_be_told_and_taken_out(
    models: list[CatalogueModel], index: int, line: str
) -> None:
    texts = list(map(entry_text, models))
    bad = f'[[model]]\nname = "bad"\n{line}\nsource = {{ kind = "path", path = "a" }}\n'
    text = "\n".join([*texts[:index], bad, *texts[index:]])
    with pytest.raises(InvalidArgument):
        parse_catalogue(text.encode(), "here")
    assert is_bad(text, "bad", "here")
    assert not any(is_bad(text, entry.name, "here") for entry in models)
    assert parse_catalogue(without(text, "bad", "here").encode(), "here").model == models


def test_of_two_bad_entries_each_can_be_taken_out(own: OwnCatalogue) -> None:
    own.put(path_entry("good"))
    with own.path.open("a") as file:
        file.write('\n[[model]]\nname = "one"\n\n[[model]]\nname = "two"\n')
    assert not own.drop_bad("good")
    assert own.drop_bad("one")
    assert own.drop_bad("two")
    assert not own.drop_bad("two")
    assert names(own) == ["good"]
    own.path.write_text("[[model]\n")
    with pytest.raises(InvalidArgument, match="correct that file"):
        own.drop_bad("one")
