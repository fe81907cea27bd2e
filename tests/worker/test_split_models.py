"""Models that are split into several files: found, checked by name, loaded as one."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_models import Spec, make_model, make_parts
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.catalogue import Catalogue, CatalogueModel, PathSource
from vram_conductor.protocol.errors import ConductorError, InvalidArgument, OutOfRange
from vram_conductor.protocol.split_files import combined_sha256
from vram_conductor.protocol.stamp import model_stamp
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.digest import Digester
from vram_conductor.worker.estimating import check_file_size
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.estimate import LlamaEstimator
from vram_conductor.worker.llama.identity import model_files
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.resolver import Resolver

SPEC = Spec(vocab="bytes", n_layer=2)
SHAPE = PoolShape(256, 1)
OPTIONS = EngineOptions(threads=1)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "models"
    folder.mkdir()
    return make_parts(SPEC, folder, tensors=8)


def refused(call: Callable[[], object]) -> ConductorError:
    with pytest.raises(ConductorError) as caught:
        call()
    return caught.value


def test_parts_are_one_model_that_is_as_large_as_the_whole(parts: list[Path]) -> None:
    whole = str(make_model(SPEC))
    assert len(parts) == 3
    estimator = LlamaEstimator(OPTIONS)
    one = estimator.estimate(whole, "whole", SHAPE, 256, 1 << 30)
    split = estimator.estimate(str(parts[0]), "split", SHAPE, 256, 1 << 30)
    estimator.close()
    assert split.info.file_bytes == sum(part.stat().st_size for part in parts)
    assert split.info.path == str(parts[0])
    assert split.info.model != one.info.model
    for name in ("weights_bytes", "kv_bytes", "compute_bytes", "state_bytes", "fit_cells"):
        assert getattr(split, name) == getattr(one, name), name
    loaded = LlamaModel(str(parts[0]), "split", OPTIONS)
    plain = LlamaModel(whole, "whole", OPTIONS)
    assert plain.measured_bytes == loaded.measured_bytes <= split.weights_bytes
    assert loaded.info == split.info
    loaded.close()
    plain.close()


def test_all_parts_decide_who_the_model_is(parts: list[Path], tmp_path: Path) -> None:
    first = str(parts[0])
    before = model_files(first)
    assert before.bytes == sum(part.stat().st_size for part in parts)
    link = tmp_path / "link"
    link.symlink_to(parts[0].parent)
    assert model_files(str(link / parts[0].name)).id == before.id
    for part in parts:
        os.utime(part, ns=(0, part.stat().st_mtime_ns + 1_000_000))
        after = model_files(first)
        assert after.id != before.id, part
        before = after


def _take_away(parts: list[Path]) -> Path:
    parts[1].unlink()
    return parts[1]


def _swap(parts: list[Path]) -> Path:
    spare = parts[1].with_suffix(".spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])
    return parts[1]


def _cut_off(parts: list[Path]) -> Path:
    os.truncate(parts[2], parts[2].stat().st_size - 1)
    return parts[2]


def _empty(parts: list[Path]) -> Path:
    parts[2].write_bytes(b"")
    return parts[2]


def _another_models(parts: list[Path]) -> Path:
    """Its place is right: only its tensors tell."""
    other = parts[1].parent.parent / "other"
    other.mkdir()
    larger = make_parts(Spec(vocab="bytes", n_layer=3), other, tensors=11)
    assert len(larger) == 3
    shutil.copy(larger[1], parts[1])
    return parts[2]


def _too_few_tensors(parts: list[Path]) -> Path:
    other = parts[1].parent.parent / "other"
    other.mkdir()
    writer = gguf.GGUFWriter(other / "few", "llama")
    writer.add_uint16("split.no", 2)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.copy(other / "few", parts[2])
    return parts[0]


def _a_whole_model(parts: list[Path]) -> Path:
    shutil.copy(make_model(SPEC), parts[1])
    return parts[1]


def _other_count(parts: list[Path]) -> Path:
    for part in (parts[0], parts[1]):
        part.rename(part.with_name(part.name.replace("-of-00003", "-of-00002")))
    parts[:] = [part.with_name(part.name.replace("-of-00003", "-of-00002")) for part in parts[:2]]
    return parts[0]


def _misnamed(parts: list[Path]) -> Path:
    parts[0] = parts[0].rename(parts[0].with_name("mine.gguf"))
    return parts[0]


DAMAGE: dict[Callable[[list[Path]], Path], str] = {
    _take_away: "model_part_missing",
    _swap: "wrong_model_part",
    _cut_off: "bad_model",
    _empty: "bad_model",
    _another_models: "wrong_model_part",
    _too_few_tensors: "wrong_model_part",
    _a_whole_model: "wrong_model_part",
    _other_count: "wrong_model_part",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_parts_that_do_not_belong_are_refused_by_name_before_anything_is_loaded(
    parts: list[Path], damage: Callable[[list[Path]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("llama.cpp saw it")

    guilty = damage(parts)
    monkeypatch.setattr(ll, "llama_model_load_from_file", load)
    first = str(parts[0])
    runner, estimator = DryRunner(OPTIONS), LlamaEstimator(OPTIONS)
    for look in (
        lambda: estimator.estimate(first, "m", SHAPE, 256, None),
        lambda: runner.estimate(first, "m", SHAPE, 256, None),
        lambda: LlamaModel(first, "m", OPTIONS),
    ):
        error = refused(look)
        assert error.reason == DAMAGE[damage]
        assert str(guilty) in str(error), error
    estimator.close()
    runner.close()


def test_a_part_under_another_name_is_told_what_it_must_be_called(parts: list[Path]) -> None:
    path = _misnamed(parts)
    error = refused(lambda: LlamaModel(str(path), "m", OPTIONS))
    assert error.reason == "wrong_model_part"
    assert "mine-00001-of-00003.gguf" in str(error)


# --- from a name to the files -------------------------------------------------------------------


@pytest.fixture
def resolver(parts: list[Path], tmp_path: Path) -> Resolver:
    entry = CatalogueModel(
        name="big",
        file=parts[0].name,
        source=PathSource(path=f"models/{parts[0].name}"),
        sha256="ab" * 32,
        size=1,
    )
    return Resolver(Catalogue(model=[entry]), tmp_path, tmp_path / "models", [])


def test_a_split_model_has_three_names(resolver: Resolver, parts: list[Path]) -> None:
    for name in ("big", parts[0].name, parts[0].name.removesuffix(".gguf"), "llama"):
        assert resolver.resolve(name, bare_path=False) == parts[0], name
    assert resolver.resolve(str(parts[0]), bare_path=False) == parts[0]


def test_other_parts_name_the_first_one(resolver: Resolver, parts: list[Path]) -> None:
    for name in (parts[1].name, str(parts[2])):
        with pytest.raises(InvalidArgument) as caught:
            resolver.resolve(name, bare_path=False)
        assert caught.value.reason == "not_the_first_part"
        assert caught.value.details["first"] == parts[0].name
        assert parts[0].name in str(caught.value)


@pytest.mark.parametrize("name", ["big", "llama", "llama-00001-of-00003.gguf"])
def test_a_missing_part_is_named(resolver: Resolver, parts: list[Path], name: str) -> None:
    parts[2].unlink()
    error = refused(lambda: resolver.resolve(name, bare_path=False))
    assert error.reason == "model_part_missing"
    assert parts[2].name in str(error)
    assert (error.details["part"], error.details["parts"]) == (3, 3)


def test_no_part_may_lead_out_of_the_allowed_folders(
    resolver: Resolver, parts: list[Path], tmp_path: Path
) -> None:
    outside = parts[1].rename(tmp_path / "outside.gguf")
    parts[1].symlink_to(outside)
    error = refused(lambda: resolver.resolve(str(parts[0]), bare_path=False))
    assert error.reason == "path_not_allowed"
    assert resolver.resolve(str(parts[0]), bare_path=True) == parts[0]


def test_only_first_parts_are_listed(resolver: Resolver, parts: list[Path]) -> None:
    error = refused(lambda: resolver.resolve("nothing-like-it", bare_path=False))
    assert error.details["known"] == ["big", parts[0].name]


def test_stage_0_counts_all_parts(parts: list[Path]) -> None:
    total = sum(part.stat().st_size for part in parts)
    check_file_size(parts[0], total)
    with pytest.raises(OutOfRange) as caught:
        check_file_size(parts[0], total - 1)
    assert caught.value.details["file_bytes"] == total


def test_the_digest_is_over_all_parts(parts: list[Path]) -> None:
    digests = [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts]
    digester = Digester()
    digester.request(parts[0], "")
    deadline = time.monotonic() + 60
    while digester.known(parts[0]) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert digester.known(parts[0]) == combined_sha256(digests)
    digester.close()
    assert model_stamp(parts[0]) == combined_sha256(digests), "kept in the parts' stamps"
    parts[1].write_bytes(b"other")
    assert digester.known(parts[0]) is None
