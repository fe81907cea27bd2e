"""Pulling from the Hugging Face hub: the real client library against a server on the loopback."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf_models import Spec, make_model
from hub_server import COMMIT, TOKEN, Fault, HubServer, Repository, use_only

from vram_conductor.client.fetch_hub import partial
from vram_conductor.client.hub import TRIES
from vram_conductor.client.model_files import verify
from vram_conductor.client.pull import Pulled, pull
from vram_conductor.protocol.catalogue import CatalogueModel, HubFile, HubSource, parse_catalogue
from vram_conductor.protocol.errors import (
    ConductorError,
    DataLoss,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from vram_conductor.protocol.split_files import combined_sha256
from vram_conductor.protocol.stamp import read_stamp

REPO = "somebody/Tiny-GGUF"
FILE = "Tiny-Q8_0.gguf"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def content() -> bytes:
    return make_model(Spec()).read_bytes()


class Place:
    """A models folder, the hub, what was said, and how long was waited."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.models = folder / "models"
        self.hub = hub
        self.said: list[str] = []
        self.pauses: list[float] = []
        self.progress: list[tuple[str, int, int]] = []

    def entry(self, *paths: str, **fields: Any) -> CatalogueModel:
        files = self.hub.repositories[REPO].files
        listed = [
            HubFile(
                path=path, sha256=hashlib.sha256(files[path]).hexdigest(), size=len(files[path])
            )
            for path in paths or [FILE]
        ]
        whole = CatalogueModel(
            name="tiny",
            file=listed[0].path.rsplit("/", 1)[-1],
            sha256=combined_sha256([file.sha256 for file in listed]),
            size=sum(file.size for file in listed),
            source=HubSource(repo=REPO, revision=COMMIT, files=listed),
            **fields,
        )
        assert whole.problem() is None
        return whole

    def pull(self, entry: CatalogueModel | None = None) -> Pulled:
        return pull(
            entry or self.entry(),
            self.models,
            self.models,
            accept_licence=False,
            say=self.said.append,
            progress=lambda *news: self.progress.append(news),
        )

    def files(self) -> list[str]:
        return sorted(path.name for path in self.models.iterdir())

    def failing(self, kind: type[ConductorError], reason: str) -> ConductorError:
        with pytest.raises(kind) as caught:
            self.pull()
        assert caught.value.reason == reason
        return caught.value


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> Iterator[Place]:
    with HubServer({REPO: Repository({FILE: content, "README.md": b"# Tiny"})}) as hub:
        made = Place(tmp_path, hub)
        made.pauses = use_only(hub, tmp_path, monkeypatch)
        yield made


# --- the good way -----------------------------------------------------------------------------


def test_a_file_comes_verified_and_once(place: Place, content: bytes) -> None:
    done = place.pull()
    assert done == Pulled("tiny", place.models / FILE, len(content), place.entry().sha256, True)
    assert done.path.read_bytes() == content
    assert read_stamp(done.path) == done.sha256
    assert place.files() == [FILE, f"{FILE}.stamp.json"]
    assert place.said == [f"fetching {REPO}/{FILE} (1 of 1)"]
    assert place.progress[-1] == ("verified", len(content), len(content))
    assert ("fetched", len(content), len(content)) in place.progress
    asked = len(place.hub.asked)
    assert asked == 2, "where it is, and its bytes; nothing else is told to anybody"
    assert not place.pull().fetched
    assert len(place.hub.asked) == asked


def test_the_token_goes_to_the_hub_and_to_nobody_else(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hub.repositories[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    place.pull()
    assert {ask.token for ask in place.hub.asked if ask.host == "hub"} == {TOKEN}
    assert {ask.token for ask in place.hub.asked if ask.host == "store"} == {""}


def test_parts_come_beside_each_other_and_only_those_that_are_missing(
    place: Place, content: bytes
) -> None:
    cut = len(content) // 2
    names = [f"q8/big-{number:05d}-of-00002.gguf" for number in (1, 2)]
    place.hub.repositories[REPO].files |= dict(
        zip(names, (content[:cut], content[cut:]), strict=True)
    )
    entry = place.entry(*names)
    done = place.pull(entry)
    first, second = (place.models / name.removeprefix("q8/") for name in names)
    assert (done.path, done.bytes) == (first, len(content))
    assert first.read_bytes() + second.read_bytes() == content
    assert done.sha256 == verify(entry, first, rehash=True, progress=lambda *_: None)
    second.unlink()
    with pytest.raises(NotFound, match=r"big-00002-of-00002\.gguf is missing"):
        verify(entry, first, rehash=False, progress=lambda *_: None)
    before = len(place.hub.fetched())
    assert place.pull(entry).fetched
    assert len(place.hub.fetched()) == before + 1
    assert second.read_bytes() == content[cut:]


def test_swapped_parts_are_noticed(place: Place, content: bytes) -> None:
    names = [f"big-{number:05d}-of-00002.gguf" for number in (1, 2)]
    half = len(content) // 2
    place.hub.repositories[REPO].files |= {
        names[0]: content[:half],
        names[1]: content[half : 2 * half],
    }
    entry = place.entry(*names)
    first = place.pull(entry).path
    second, spare = first.with_name(names[1]), first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    with pytest.raises(DataLoss, match=f"{names[0]} is not tiny"):
        verify(entry, first, rehash=False, progress=lambda *_: None)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_another_program_has_fetched_is_copied_if_it_is_right(
    place: Place, content: bytes, damaged: bool
) -> None:
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType] - dict

    cached = Path(hf_hub_download(REPO, FILE, revision=COMMIT, endpoint=place.hub.url()))
    if damaged:
        cached.write_bytes(b"x" * len(content))
    place.hub.asked.clear()
    assert place.pull().path.read_bytes() == content
    assert len(place.hub.asked) == (2 if damaged else 0)
    assert cached.stat().st_size == len(content), "it stays where it is"
    assert f"copying it from {cached}" in place.said


# --- interruptions: what has come is kept -----------------------------------------------------


def test_a_cut_connection_goes_on_where_it_was(place: Place, content: bytes) -> None:
    cut = 3 * len(content) // 4
    place.hub.faults["store"] = [Fault(cut_after=cut)]
    assert place.pull().path.read_bytes() == content
    first, second = place.hub.fetched()
    assert first == ""
    begin = int(second.removeprefix("bytes=").rstrip("-"))
    assert 0 < begin <= cut
    assert any("going on at" in text for text in place.said)


def test_a_connection_that_breaks_often_gets_there_as_long_as_something_comes(
    place: Place, content: bytes
) -> None:
    step = 1 << 16
    cuts = len(content) // step
    assert cuts > TRIES
    place.hub.faults["store"] = [Fault(cut_after=step)] * cuts
    assert place.pull().path.read_bytes() == content
    assert len(place.hub.fetched()) == cuts + 1
    assert set(place.pauses) == {0.5}


def test_the_next_run_goes_on_where_a_failed_one_ended(place: Place, content: bytes) -> None:
    place.hub.faults["store"] = [Fault(cut_after=3 * len(content) // 4)]
    place.hub.faults["hub"] = [Fault(), *[Fault(status=503)] * TRIES]
    error = place.failing(Unavailable, "hub_unavailable")
    assert error.retryable
    part = partial(place.models / FILE, place.entry().sha256)
    kept = part.stat().st_size
    assert place.files() == [part.name]
    assert 0 < kept < len(content)
    assert place.pull().path.read_bytes() == content
    assert place.hub.fetched()[-1] == f"bytes={kept}-"
    assert place.files() == [FILE, f"{FILE}.stamp.json"]


def test_ctrl_c_keeps_what_has_come(
    place: Place, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*news: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(
            place.entry(),
            place.models,
            place.models,
            accept_licence=False,
            say=place.said.append,
            progress=interrupt,
        )
    assert place.files() == [partial(place.models / FILE, place.entry().sha256).name]
    assert place.pull().path.read_bytes() == content
    assert place.hub.fetched()[-1].startswith("bytes=")


def test_a_server_without_ranges_begins_anew(place: Place, content: bytes) -> None:
    place.hub.ranges = False
    place.hub.faults["store"] = [Fault(cut_after=3 * len(content) // 4)]
    assert place.pull().path.read_bytes() == content
    assert place.hub.fetched()[1].startswith("bytes=")


def test_a_beginning_that_is_rubbish_costs_one_more_fetch(place: Place, content: bytes) -> None:
    part = partial(place.models / FILE, place.entry().sha256)
    place.models.mkdir()
    part.write_bytes(b"\0" * 1000)
    assert place.pull().path.read_bytes() == content
    assert place.hub.fetched() == ["bytes=1000-", ""]


@pytest.mark.parametrize("more", [0, 7])
def test_a_beginning_as_long_as_the_whole(place: Place, content: bytes, more: int) -> None:
    part = partial(place.models / FILE, place.entry().sha256)
    place.models.mkdir()
    part.write_bytes(content + b"x" * more)
    assert place.pull().path.read_bytes() == content
    assert place.hub.fetched() == ([""] if more else [])


def test_who_is_busy_is_asked_again_when_it_says(place: Place, content: bytes) -> None:
    busy = Fault(status=429, headers={"Retry-After": "7"})
    place.hub.faults["hub"] = [busy, Fault(status=502)]
    assert place.pull().path.read_bytes() == content
    assert place.pauses[0] == 7.0
    assert len(place.pauses) == 2


def test_who_is_busy_for_long_is_not_waited_for(place: Place) -> None:
    place.hub.faults["hub"] = [Fault(status=429, headers={"Retry-After": "3600"})]
    error = place.failing(Unavailable, "hub_unavailable")
    assert error.retry_after_ms == 3_600_000
    assert "asked too often" in error.info.message
    assert place.pauses == []


def test_a_hub_that_stays_broken(place: Place) -> None:
    place.hub.faults["hub"] = [Fault(status=500)] * TRIES
    error = place.failing(Unavailable, "hub_unavailable")
    assert "HTTP 500" in error.info.message
    assert place.pauses == [1.0, 2.0, 4.0, 8.0]
    assert place.files() == []


# --- what came is not what was promised -------------------------------------------------------


def test_bytes_that_were_altered_on_the_way_are_never_put_in_place(place: Place) -> None:
    place.hub.faults["store"] = [Fault(altered=True)]
    error = place.failing(DataLoss, "model_corrupt")
    assert "sha256" in error.info.message
    assert place.files() == []
    assert place.pull().fetched


@pytest.mark.parametrize("cut", [0, 1])
def test_a_file_that_was_replaced_on_the_hub_is_not_fetched(
    place: Place, content: bytes, cut: int
) -> None:
    entry = place.entry()
    place.hub.repositories[REPO].files[FILE] = content[cut:-1] + b"x"
    with pytest.raises(DataLoss, match="add --replace") as caught:
        place.pull(entry)
    assert caught.value.reason == "model_corrupt"
    assert place.hub.fetched() == []


def test_more_bytes_than_promised_are_not_written(place: Place, content: bytes) -> None:
    entry = place.entry()

    class Growing(dict[str, bytes]):
        """Whoever looks for the first time sees the file that was promised."""

        looks = 0

        def __getitem__(self, path: str) -> bytes:
            self.looks += 1
            return content if self.looks == 1 else content * 50

    place.hub.repositories[REPO].files = Growing({FILE: content})
    with pytest.raises(DataLoss, match="more than"):
        place.pull(entry)
    assert place.files() == [partial(place.models / FILE, entry.sha256).name]
    assert partial(place.models / FILE, entry.sha256).stat().st_size == 0


# --- who may, and what is there ---------------------------------------------------------------


def test_a_gated_model_without_a_token(place: Place) -> None:
    place.hub.repositories[REPO].gated = True
    error = place.failing(PermissionDenied, "model_gated")
    for text in (f"{place.hub.url()}/{REPO}", "accept its terms", "HF_TOKEN", "hf auth login"):
        assert text in error.info.message


def test_a_gated_model_with_the_token_of_somebody_who_has_not_accepted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hub.repositories[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    error = place.failing(PermissionDenied, "model_gated")
    assert "has not accepted its terms" in error.info.message
    assert f"{place.hub.url()}/{REPO}" in error.info.message
    assert "hf_of_another" not in str(error)


def test_a_token_that_is_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_rubbish")
    said = {"X-Error-Message": "Invalid credentials in Authorization header"}
    place.hub.faults["hub"] = [Fault(status=401, headers=said)]
    error = place.failing(Unauthenticated, "hub_denied")
    assert "does not accept this token" in error.info.message
    assert "hf_rubbish" not in str(error)


def test_somebody_without_a_token_is_asked_for_one(place: Place) -> None:
    said = {"X-Error-Message": "Invalid credentials in Authorization header"}
    place.hub.faults["hub"] = [Fault(status=401, headers=said)]
    error = place.failing(Unauthenticated, "hub_denied")
    assert "set HF_TOKEN" in error.info.message


def test_what_else_is_forbidden(place: Place) -> None:
    place.hub.faults["hub"] = [Fault(status=403, headers={"X-Error-Message": "not from here"})]
    error = place.failing(PermissionDenied, "hub_denied")
    assert "not from here" in error.info.message


def test_a_repository_that_is_gone(place: Place) -> None:
    entry = place.entry()
    del place.hub.repositories[REPO]
    with pytest.raises(NotFound, match="models search") as caught:
        place.pull(entry)
    assert caught.value.reason == "no_such_repo"


def test_a_file_that_is_gone(place: Place) -> None:
    entry = place.entry()
    del place.hub.repositories[REPO].files[FILE]
    with pytest.raises(NotFound, match=f"models search {REPO}") as caught:
        place.pull(entry)
    assert caught.value.reason == "no_such_file"


# --- no way there -----------------------------------------------------------------------------


def test_nobody_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        error = place.failing(Unavailable, "hub_unavailable")
    assert f"cannot reach {endpoint}" in error.info.message
    assert "HTTPS_PROXY" in error.info.message
    assert place.pauses == [1.0], "nobody waits long for a network that is not there"


def test_offline_mode(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = place.failing(FailedPrecondition, "hub_offline")
    assert "HF_HUB_OFFLINE" in error.info.message


def test_without_the_client_library(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    error = place.failing(FailedPrecondition, "hub_client_missing")
    assert "pip install '.[models]'" in error.info.message


def test_too_little_room_is_said_before_the_first_byte(
    place: Place, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, len(content) - 1001))
    error = place.failing(ResourceExhausted, "disk_full")
    assert error.details["requested_bytes"] == len(content)
    assert place.hub.asked == []
    # What is there already needs no room any more.
    partial(place.models / FILE, place.entry().sha256).write_bytes(content[:1001])
    assert place.pull().fetched


def test_an_entry_of_a_file_is_what_was_pulled(place: Place) -> None:
    entry = place.entry()
    text = f"""
[[model]]
name = "tiny"
file = "{FILE}"
sha256 = "{entry.sha256}"
size = {entry.size}
source = {{ kind = "huggingface", repo = "{REPO}", revision = "{COMMIT}", files = [
  {{ path = "{FILE}", sha256 = "{entry.sha256}", size = {entry.size} }},
] }}
"""
    assert parse_catalogue(text.encode(), "here").model == [entry]
