"""Estimates against what the real load then allocates; typed errors; a child that dies."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import psutil
import pytest
from chats import greedy, prefill, some_ids
from gguf_models import Spec, make_model

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from vram_conductor.protocol.values import KVType, PoolShape
from vram_conductor.worker.engine import Estimate
from vram_conductor.worker.llama import dryrun, isolated, loading
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.estimate import LlamaEstimator
from vram_conductor.worker.llama.identity import ModelFiles
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

LINE = (1 << 20) // 100 + 2
"""A printed size is rounded to 0.01 MiB: no two that are equal differ by more."""

TINY = [
    Spec(arch="llama"),
    Spec(arch="qwen2", tied=False),
    Spec(arch="gemma3", n_layer=7, tied=False),
    Spec(arch="mamba"),
    Spec(arch="jamba"),
    Spec(arch="lfm2"),
]
SHAPES = [
    PoolShape(256, 1),
    PoolShape(512, 3, "q8_0"),
    PoolShape(2048, 1, "q4_0"),
    PoolShape(2048, 4),
    PoolShape(1024, 2, "f32"),
]


@pytest.fixture(scope="module")
def estimator() -> Iterator[LlamaEstimator]:
    estimator = LlamaEstimator(EngineOptions(threads=1))
    yield estimator
    estimator.close()


def within(estimated: int, measured: int, lines: int) -> None:
    """Never under, and equal but for the rounding of so many lines."""
    assert measured <= estimated <= measured + lines * LINE


def compare(
    engine: LlamaEngine, estimator: LlamaEstimator, path: Path, shapes: list[PoolShape]
) -> None:
    model = engine.load(str(path), "model")
    for shape in shapes:
        estimate = estimator.estimate(str(path), "model", shape, 256, None)
        pool = model.open_pool(shape)
        within(estimate.weights_bytes, model.measured_bytes, 2)
        within(estimate.kv_bytes, pool.sizes.kv_bytes, 2)
        within(estimate.compute_bytes, pool.sizes.compute_bytes, 2)
        within(estimate.recurrent_bytes, pool.sizes.recurrent_bytes, 1)
        within(estimate.pool_bytes, pool.measured_bytes, 5)
        assert estimate.shape == shape
        assert estimate.info.model == model.info.model
        assert estimate.info == model.info
        pool.close()
    model.close()


@pytest.mark.parametrize("spec", TINY, ids=lambda spec: str(spec.arch))
def test_estimate_equals_what_is_allocated(
    engine: LlamaEngine, estimator: LlamaEstimator, spec: Spec
) -> None:
    compare(engine, estimator, make_model(spec), SHAPES)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_estimate_equals_what_is_allocated_for_real_models(
    engine: LlamaEngine, estimator: LlamaEstimator, name: str, request: pytest.FixtureRequest
) -> None:
    compare(engine, estimator, request.getfixturevalue(name), [*SHAPES, PoolShape(8192, 2, "q8_0")])


def check_state(
    model: LlamaModel, estimator: LlamaEstimator, path: Path, shape: PoolShape, n_ctx: int
) -> None:
    """The bound holds for a conversation that fills its n_ctx, and is close."""
    bound = estimator.estimate(str(path), "model", shape, n_ctx, None).state_bytes
    pool = model.open_pool(shape)
    slot = shape.slots - 1
    prefill(pool, slot, some_ids(n_ctx, 1))
    real = pool.state_bytes(slot)
    pool.close()
    assert real <= bound <= real + max(real // 50, 64 << 10)


@pytest.mark.parametrize("spec", TINY, ids=lambda spec: str(spec.arch))
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_state_bound(
    engine: LlamaEngine, estimator: LlamaEstimator, spec: Spec, kv_type: KVType
) -> None:
    path = make_model(spec)
    model = engine.load(str(path), "model")
    check_state(model, estimator, path, PoolShape(512, 1, kv_type), 512)
    check_state(model, estimator, path, PoolShape(2048, 3, kv_type), 300)
    check_state(model, estimator, path, PoolShape(256, 1, kv_type), 10)
    model.close()


@pytest.mark.real
@pytest.mark.parametrize(("name", "n_ctx"), [("smollm2", 256), ("gemma3", 640)])
def test_state_bound_of_real_models(
    engine: LlamaEngine,
    estimator: LlamaEstimator,
    name: str,
    n_ctx: int,
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(name)
    model = engine.load(str(path), "model")
    check_state(model, estimator, path, PoolShape(768, 1), n_ctx)
    model.close()


@pytest.mark.parametrize("spec", TINY, ids=lambda spec: str(spec.arch))
def test_the_largest_pool_that_fits(estimator: LlamaEstimator, spec: Spec) -> None:
    path = str(make_model(spec))
    top = 4096 * 2

    def pool_bytes(cells: int) -> int:
        return estimator.estimate(path, "m", PoolShape(cells, 2), 256, None).pool_bytes

    for budget in (pool_bytes(256) - 1, pool_bytes(256), pool_bytes(1792), pool_bytes(1792) - 1):
        fit = estimator.estimate(path, "m", PoolShape(512, 2), 256, budget).fit_cells
        assert fit is not None
        assert fit == 0 or pool_bytes(fit) <= budget
        assert fit == top or pool_bytes(fit + 256) > budget
    most = estimator.estimate(path, "m", PoolShape(512, 2), 256, 1 << 40).fit_cells
    assert most == top


@pytest.mark.real
def test_the_largest_pool_that_fits_a_real_model(estimator: LlamaEstimator, smollm2: Path) -> None:
    budget = 100 << 20
    fit = estimator.estimate(str(smollm2), "s", PoolShape(512, 1), 512, budget).fit_cells
    assert fit
    at, above = (
        estimator.estimate(str(smollm2), "s", PoolShape(cells, 1), 512, None).pool_bytes
        for cells in (fit, fit + 256)
    )
    assert at <= budget < above


# --- errors -----------------------------------------------------------------------------------


def ask(estimator: LlamaEstimator, path: Path | str, **changes: object) -> None:
    shape = PoolShape(int(changes.get("cells", 512)), 1, changes.get("kv_type", "f16"))  # type: ignore[call-overload,arg-type]
    estimator.estimate(str(path), "model", shape, int(changes.get("n_ctx", 256)), None)  # type: ignore[call-overload]


def still_works(estimator: LlamaEstimator) -> None:
    ask(estimator, make_model(TINY[0]))


def test_a_missing_file(estimator: LlamaEstimator, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path / "nowhere.gguf", tmp_path, fifo, "nul\0byte"):
        with pytest.raises(NotFound) as caught:
            ask(estimator, path)
        assert caught.value.reason == "no_such_model"


def damaged(tmp_path: Path, how: str) -> Path:
    whole = make_model(Spec(arch="llama", vocab="bytes")).read_bytes()
    data = {
        "empty": b"",
        "no gguf": b"PK\x03\x04" + whole[4:],
        "magic only": whole[:4],
        "version": whole[:4] + struct.pack("<I", 99) + whole[8:],
        "counts": whole[:8] + struct.pack("<QQ", 1 << 40, 1 << 40) + whole[24:],
        "negative counts": whole[:8] + struct.pack("<qq", -1, -1) + whole[24:],
        "cut in the key-values": whole[:300],
        "cut in the tensor list": whole[:9000],
        "cut in the data": whole[: len(whole) - 5000],
        "noise": whole[:24] + bytes(range(256)) * 30,
    }[how]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "no gguf",
        "magic only",
        "version",
        "counts",
        "negative counts",
        "cut in the key-values",
        "cut in the tensor list",
        "cut in the data",
        "noise",
    ],
)
def test_damaged_files(estimator: LlamaEstimator, tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path, how)
    with pytest.raises(InvalidArgument) as caught:
        ask(estimator, path)
    assert caught.value.reason == "bad_model"
    message = caught.value.info.message
    assert str(path) in message
    assert "again" in message
    assert "no reason" not in message
    still_works(estimator)


def test_damage_is_named_with_llama_cpps_own_words(
    estimator: LlamaEstimator, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ask(estimator, damaged(tmp_path, "cut in the data"))
    assert "not within the file bounds" in caught.value.info.message


def renamed_architecture(tmp_path: Path, arch: str) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("no_vocab")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_an_unknown_architecture_is_named(estimator: LlamaEstimator, tmp_path: Path) -> None:
    with pytest.raises(Unimplemented) as caught:
        ask(estimator, renamed_architecture(tmp_path, "hal9000"))
    assert caught.value.reason == "unsupported_model"
    assert caught.value.details["arch"] == "hal9000"


def test_context_beyond_training(estimator: LlamaEstimator) -> None:
    path = make_model(TINY[0])
    ask(estimator, path, n_ctx=4096)
    with pytest.raises(OutOfRange) as caught:
        ask(estimator, path, n_ctx=4097)
    assert caught.value.reason == "n_ctx_beyond_training"
    assert caught.value.details == {"n_ctx": 4097, "n_ctx_train": 4096}


def test_a_cache_type_that_the_model_cannot_have(estimator: LlamaEstimator) -> None:
    path = make_model(Spec(arch="llama", n_embd=48))  # heads of 24: not a multiple of 32
    ask(estimator, path)
    with pytest.raises(FailedPrecondition) as caught:
        ask(estimator, path, kv_type="q8_0")
    assert caught.value.reason == "kv_type_unsupported"
    assert "f16" in caught.value.info.message


def test_a_file_that_crashes_llama_cpp_is_a_bad_model(estimator: LlamaEstimator) -> None:
    path = make_model(Spec(arch="jamba", ssm_inner=192))
    for _ in range(2):
        with pytest.raises(InvalidArgument) as caught:
            ask(estimator, path)
        assert caught.value.reason == "bad_model"
        assert "SIGABRT" in caught.value.info.message
        assert "GGML_ASSERT" in caught.value.info.message
    still_works(estimator)


def child_of(process: isolated.DryRunProcess) -> int:
    process.start()
    assert process._child is not None
    return process._child.pid


def test_a_dead_child_is_replaced() -> None:
    process = isolated.DryRunProcess(EngineOptions(threads=1))
    path, shape = str(make_model(TINY[0])), PoolShape(256, 1)
    before = process.estimate(path, "m", shape, 256, None)
    os.kill(child_of(process), signal.SIGKILL)
    assert process._child is not None
    process._child.wait(10)
    assert process.estimate(path, "m", shape, 256, None) == before
    process.close()
    process.close()


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    process = isolated.DryRunProcess(EngineOptions(threads=1))
    path, shape = str(make_model(TINY[0])), PoolShape(256, 1)
    process.estimate(path, "m", shape, 256, None)
    pid = child_of(process)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(isolated, "DEADLINE_S", 0.2)
    with pytest.raises(Unavailable) as caught:
        process.estimate(path, "m", shape, 256, None)
    assert caught.value.reason == "estimate_failed"
    assert caught.value.retryable
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    monkeypatch.undo()
    process.estimate(path, "m", shape, 256, None)
    process.close()


def test_the_child_ends_with_its_engine() -> None:
    process = isolated.DryRunProcess(EngineOptions(threads=1))
    pid = child_of(process)
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_child_ends_when_its_parent_is_killed() -> None:
    script = """if True:
        import time
        from vram_conductor.worker.llama.isolated import DryRunProcess
        from vram_conductor.worker.llama.options import EngineOptions
        process = DryRunProcess(EngineOptions(threads=1))
        process.start()
        print(process._child.pid, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(20)
    assert not child.is_running()


# --- caching, identity, threads ---------------------------------------------------------------


def test_the_same_question_is_answered_from_memory(
    estimator: LlamaEstimator, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    shutil.copy(make_model(TINY[0]), path)
    link = tmp_path / "b.gguf"
    link.hardlink_to(path)
    first = estimator.estimate(str(path), "a", PoolShape(768, 1), 256, None)
    again = estimator.estimate(str(link), "b", PoolShape(768, 1), 256, None)
    assert (first.cached, again.cached) == (False, True)
    assert again.info.model == first.info.model
    assert (again.info.name, again.info.path) == ("b", str(link))
    assert again.pool_bytes == first.pool_bytes
    # Another file under the same name is another model.
    path.unlink()
    shutil.copy(make_model(TINY[1]), path)
    other = estimator.estimate(str(path), "a", PoolShape(768, 1), 256, None)
    assert other.info.model != first.info.model
    assert other.info.arch == "qwen2"
    assert not other.cached


def test_dry_models_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = loading.load_model

    def counted(files: ModelFiles, options: EngineOptions, *, dry: bool) -> object:
        loads.extend(files.paths)
        return load(files, options, dry=dry)

    monkeypatch.setattr(dryrun, "load_model", counted)
    runner = DryRunner(EngineOptions(threads=1))
    paths = [str(make_model(spec)) for spec in TINY[:5]]
    for path in paths:
        for cells in (256, 512):
            runner.estimate(path, "m", PoolShape(cells, 1), 256, 1 << 21)
    assert loads == paths
    assert len(runner._models) == dryrun.DRY_MODELS_MAX
    assert runner.estimate(paths[0], "m", PoolShape(256, 1), 256, None).cached
    assert loads == paths
    runner.estimate(paths[0], "m", PoolShape(1024, 1), 256, None)
    assert loads == [*paths, paths[0]]
    runner.close()
    assert not runner._models


def test_recurrent_caches_are_not_tried_out_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = DryRunner(EngineOptions(threads=1))
    path = str(make_model(Spec(arch="mamba")))
    monkeypatch.setattr(dryrun, "RECURRENT_BYTES_MAX", 100_000)
    runner.estimate(path, "m", PoolShape(256, 2), 256, None)
    with pytest.raises(ResourceExhausted) as caught:
        runner.estimate(path, "m", PoolShape(256, 3), 256, None)
    assert caught.value.reason == "estimate_failed"
    assert caught.value.details["recurrent_bytes"] > caught.value.details["limit_bytes"]
    runner.close()


def test_a_buffer_of_an_unknown_kind_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "unknown_buffers", lambda lines: ["new cache buffer size = 9 MiB"])
    runner = DryRunner(EngineOptions(threads=1))
    with pytest.raises(Internal) as caught:
        runner.estimate(str(make_model(TINY[0])), "m", PoolShape(256, 1), 256, None)
    assert caught.value.reason == "estimate_failed"
    runner.close()


def test_estimates_beside_a_running_decode(engine: LlamaEngine) -> None:
    """On cuda dry runs share the process with the engine thread."""
    path = str(make_model(TINY[0]))
    model = engine.load(path, "m")
    pool = model.open_pool(PoolShape(512, 1))
    expected = greedy(model, pool, 0, some_ids(20, 1), 200)
    runner = DryRunner(EngineOptions(threads=1))
    alone = [
        runner.estimate(str(make_model(spec)), "m", shape, 256, 1 << 21)
        for spec in TINY
        for shape in SHAPES
    ]
    runner.close()
    other = DryRunner(EngineOptions(threads=1))
    found: list[Estimate] = []

    def estimate() -> None:
        for spec in TINY:
            for shape in SHAPES:
                found.append(other.estimate(str(make_model(spec)), "m", shape, 256, 1 << 21))

    thread = threading.Thread(target=estimate)
    thread.start()
    rounds = 0
    while thread.is_alive() or not rounds:
        pool.truncate(0, 0)
        assert greedy(model, pool, 0, some_ids(20, 1), 200) == expected
        beside = model.open_pool(PoolShape(512, 1))
        assert beside.measured_bytes == pool.measured_bytes
        beside.close()
        rounds += 1
    thread.join()
    assert found == alone
    other.close()
    pool.close()
    model.close()
