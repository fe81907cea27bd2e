"""From a model's name to its file, its size check and its digest."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.catalogue import Catalogue, CatalogueModel, PathSource
from vram_conductor.protocol.catalogue_files import CatalogueFiles
from vram_conductor.protocol.commands import Estimate, Estimated, Failed
from vram_conductor.protocol.config import WorkerConfig
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
)
from vram_conductor.protocol.stamp import read_stamp, stamp_path
from vram_conductor.protocol.values import ModelInfo, PoolShape
from vram_conductor.worker import engine as contract
from vram_conductor.worker.app import open_resolver
from vram_conductor.worker.arena_format import HEADER_BYTES, parked_bytes
from vram_conductor.worker.digest import Digester
from vram_conductor.worker.estimating import Estimating, check_file_size
from vram_conductor.worker.resolver import Resolver

SHAPE = PoolShape(cells=256, slots=1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """models/ (pulled), allowed/ (listed), secret/ (neither)."""
    for folder in ("models", "allowed/sub", "secret"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "pulled.gguf").write_bytes(b"p")
    (tmp_path / "allowed" / "mine.gguf").write_bytes(b"m")
    (tmp_path / "allowed" / "sub" / "deep.gguf").write_bytes(b"d")
    (tmp_path / "secret" / "key.gguf").write_bytes(b"s")
    (tmp_path / "linked.gguf").write_bytes(b"l")
    return tmp_path


@pytest.fixture
def resolver(tree: Path) -> Resolver:
    def entry(name: str, path: str) -> CatalogueModel:
        return CatalogueModel(
            name=name, file=f"{name}.gguf", source=PathSource(path=path), sha256="ab" * 32, size=1
        )

    catalogue = Catalogue(
        model=[entry("tiny", "models/pulled.gguf"), entry("smollm2-135m", "models/none.gguf")]
    )
    return Resolver(catalogue, tree, tree / "models", [tree / "allowed"])


def refused(resolver: Resolver, model: str, *, bare_path: bool = False) -> ConductorError:
    with pytest.raises(ConductorError) as caught:
        resolver.resolve(model, bare_path=bare_path)
    return caught.value


def test_names_files_and_paths(resolver: Resolver, tree: Path) -> None:
    def found(model: str) -> Path:
        return resolver.resolve(model, bare_path=False)

    assert found("tiny") == tree / "models" / "pulled.gguf"
    assert found("pulled.gguf") == found("pulled") == tree / "models" / "pulled.gguf"
    assert found("mine") == tree / "allowed" / "mine.gguf"
    assert found("sub/deep.gguf") == tree / "allowed" / "sub" / "deep.gguf"
    assert found(str(tree / "allowed" / "mine.gguf")) == tree / "allowed" / "mine.gguf"


def test_a_catalogue_model_that_is_not_here_names_the_command(resolver: Resolver) -> None:
    error = refused(resolver, "smollm2-135m")
    assert isinstance(error, NotFound)
    assert error.reason == "model_not_pulled"
    assert "conductor models pull smollm2-135m" in error.info.message


@pytest.mark.parametrize("model", ["smollm2-135m", "zzz", "smollm2-135"])
def test_a_model_that_is_missing_is_missing_on_the_workers_host(tree: Path, model: str) -> None:
    """Who registers an agent may sit at another one."""
    config = WorkerConfig(models_dir=str(tree))
    named = open_resolver(config)
    unnamed = Resolver(CatalogueFiles(config), tree, tree, [])
    host = socket.gethostname()
    for each, says in ((named, f"on the worker's host, {host}"), (unnamed, "on the worker's host")):
        message = refused(each, model).info.message
        assert says in message
        assert " there" in message
        assert "this machine" not in message


def test_an_unknown_name_gets_near_ones(resolver: Resolver) -> None:
    error = refused(resolver, "smollm-135m")
    assert (error.info.code, error.reason) == (Code.NOT_FOUND, "no_such_model")
    assert error.details["near"][0] == "smollm2-135m"
    assert "conductor models pull smollm2-135m" in error.info.message
    error = refused(resolver, "pulld.gguf")
    assert "pulled.gguf" in error.details["near"]
    error = refused(resolver, "zzz")
    assert error.details["near"] == []
    assert "tiny" in error.info.message


def test_paths_outside_need_the_brokers_word(resolver: Resolver, tree: Path) -> None:
    secret = str(tree / "secret" / "key.gguf")
    error = refused(resolver, secret)
    assert isinstance(error, PermissionDenied)
    assert error.reason == "path_not_allowed"
    assert "model_dirs" in error.info.message
    assert resolver.resolve(secret, bare_path=True) == Path(secret)
    assert refused(resolver, str(tree / "secret" / "no.gguf"), bare_path=True).reason == (
        "no_such_model"
    )


@pytest.mark.parametrize("model", ["../secret/key.gguf", "sub/../../secret/key.gguf"])
def test_a_way_out_of_the_folder_is_none(resolver: Resolver, model: str) -> None:
    assert refused(resolver, model).reason == "path_not_allowed"
    assert refused(resolver, model, bare_path=True).reason == "path_not_allowed"


def test_whether_a_forbidden_file_exists_is_not_told(resolver: Resolver, tree: Path) -> None:
    there = refused(resolver, str(tree / "secret" / "key.gguf"))
    absent = refused(resolver, str(tree / "secret" / "none.gguf"))
    assert there.info == absent.info


def test_a_link_inside_must_lead_inside(resolver: Resolver, tree: Path) -> None:
    (tree / "allowed" / "out.gguf").symlink_to(tree / "secret" / "key.gguf")
    (tree / "allowed" / "in.gguf").symlink_to(tree / "allowed" / "mine.gguf")
    path = str(tree / "allowed" / "out.gguf")
    assert refused(resolver, path).reason == "path_not_allowed"
    resolver.resolve(str(tree / "allowed" / "in.gguf"), bare_path=False)
    # By its plain name it is what the operator put there.
    (tree / "allowed" / "loop.gguf").symlink_to(tree / "allowed" / "loop.gguf")
    assert refused(resolver, str(tree / "allowed" / "loop.gguf")).reason == "no_such_model"


def test_not_a_file_and_bad_names(resolver: Resolver, tree: Path) -> None:
    os.mkfifo(tree / "allowed" / "pipe.gguf")
    for model in (str(tree / "allowed" / "sub"), str(tree / "allowed" / "pipe.gguf")):
        assert refused(resolver, model).reason == "not_a_file"
    for model in ("", "a\0b", "x" * 5000):
        assert isinstance(refused(resolver, model), InvalidArgument)
    for model in (".", "..", "x" * 300, "/", "//", "~/x", "x/" * 1000):
        refused(resolver, model)


@given(st.text(max_size=60))
def test_any_text_gives_a_file_inside_or_a_typed_error(text: str) -> None:
    resolver = Resolver(Catalogue(), Path("/nowhere"), Path("/nowhere"), [])
    with pytest.raises(ConductorError):
        resolver.resolve(text, bare_path=False)


def test_stage_0_needs_only_the_size(tmp_path: Path) -> None:
    file = tmp_path / "big.gguf"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # sparse
    check_file_size(file, 1 << 40)
    check_file_size(file, None)
    with pytest.raises(OutOfRange, match="never fits") as caught:
        check_file_size(file, (1 << 40) - 1)
    assert caught.value.reason == "file_exceeds_cap"
    assert caught.value.details == {"file_bytes": 1 << 40, "cap_bytes": (1 << 40) - 1}


class FakeEstimator:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def estimate(
        self, path: str, name: str, shape: PoolShape, n_ctx: int, fit_bytes: int | None
    ) -> contract.Estimate:
        self.asked.append((path, name))
        if self.error:
            raise self.error
        info = ModelInfo(
            model="m",
            name=name,
            path=path,
            file_bytes=1,
            arch="a",
            n_ctx_train=1,
            n_vocab=1,
            chat_template=False,
        )
        return contract.Estimate(info, shape, 1, 2, 3, 4, 1000, fit_bytes, cached=False)


def eventually(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@pytest.fixture
def digester() -> Digester:
    return Digester()


def ask(resolver: Resolver, digester: Digester, **fields: object) -> Estimated | Failed:
    estimator = FakeEstimator()
    error = fields.pop("error", None)
    assert error is None or isinstance(error, Exception)
    estimator.error = error
    sent: list[Estimated | Failed] = []
    estimating = Estimating(
        estimator,
        resolver,
        digester,
        7,
        lambda item: sent.append(item[0]),  # type: ignore[arg-type]
    )
    command = {"model": "tiny", "shape": SHAPE, "n_ctx": 256, "cap_bytes": 100, **fields}
    estimating.submit(Estimate(broker_epoch=1, op=3, **command))  # type: ignore[arg-type]
    eventually(lambda: bool(sent), "an answer")
    estimating.close()
    assert (sent[0].broker_epoch, sent[0].op, sent[0].worker_epoch) == (1, 3, 7)
    return sent[0]


def test_estimates_are_answered_on_their_own_thread(
    resolver: Resolver, digester: Digester, tree: Path
) -> None:
    answer = ask(resolver, digester, fit_bytes=5)
    assert isinstance(answer, Estimated)
    assert answer.pool_bytes == 2 + 3 + 4
    assert answer.model.path == str(tree / "models" / "pulled.gguf")
    assert answer.state_bytes == parked_bytes(1000) > HEADER_BYTES + 1000
    assert answer.fit_cells == 5
    answer = ask(resolver, digester, cap_bytes=0)
    assert isinstance(answer, Failed)
    assert answer.error.reason == "file_exceeds_cap"
    answer = ask(resolver, digester, error=NotFound("gone", "gone"))
    assert isinstance(answer, Failed)
    assert answer.error.reason == "gone"
    answer = ask(resolver, digester, error=ZeroDivisionError())
    assert isinstance(answer, Failed)
    assert answer.error.reason == "internal_error"


def test_a_digest_is_found_once_and_kept_in_a_stamp(tmp_path: Path, digester: Digester) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"content" * 1000)
    expected = hashlib.sha256(b"content" * 1000).hexdigest()
    assert digester.known(file) is None
    digester.request(file, expected)
    eventually(lambda: read_stamp(file) == expected, "the stamp")
    assert digester.known(file) == expected
    file.write_bytes(b"other")
    assert digester.known(file) is None, "another content has another digest"
    digester.close()


def test_a_file_that_is_not_the_catalogues_is_said(
    tmp_path: Path, digester: Digester, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"content")
    with caplog.at_level(logging.ERROR):
        digester.request(file, "00" * 32)
        eventually(lambda: digester.known(file) is not None, "the digest")
        digester.close()
    assert "conductor models verify" in caplog.text


def test_no_hashing_where_it_is_switched_off_and_no_stamp_where_none_can_be(
    tmp_path: Path, digester: Digester, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"content")
    off = Digester(enabled=False)
    off.request(file, "")
    off.close()
    assert off.known(file) is None

    def refuse(file: Path, sha256: str, stat: os.stat_result) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("vram_conductor.worker.digest.write_stamp", refuse)
    digester.request(file, "")
    eventually(lambda: digester.known(file) is not None, "known without a stamp")
    assert not stamp_path(file).exists()
    digester.request(tmp_path / "gone.gguf", "")
    digester.close()
