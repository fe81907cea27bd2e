"""The worker's side of ``bench pipeline``: iterations found, bad settings refused, rows made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cuda_on_cpu.device import EmulatedCuda
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import ConductorError, DataLoss
from vram_conductor.worker.bench import __main__, pipeline, pipeline_payload
from vram_conductor.worker.bench.iterations import CLOSE, find_iterations
from vram_conductor.worker.bench.pipeline import Aim, Budget, measure_grid, measure_setting
from vram_conductor.worker.bench.pipeline_payload import Shape, busy_notes
from vram_conductor.worker.memory import HostMemory
from vram_conductor.worker.pipeline import cuda, measure
from vram_conductor.worker.pipeline.synthetic_host import SyntheticHost

KIB, MIB = 1 << 10, 1 << 20


@given(st.floats(0.0, 2.0), st.floats(0.0, 5.0), st.floats(1e-4, 1.0), st.floats(0.01, 100.0))
def test_iterations_are_found_however_a_device_computes(
    fixed_ms: float, least_ms: float, each_ms: float, wanted_ms: float
) -> None:
    """Time goes up in a line from some count on: before, memory is what takes it."""
    looks: list[int] = []

    def compute_ms(count: int) -> float:
        looks.append(count)
        return max(least_ms, fixed_ms + each_ms * count)

    found = find_iterations(compute_ms, wanted_ms)
    assert found >= 1
    off = abs(compute_ms(found) - wanted_ms)
    best = max(1, int((wanted_ms - fixed_ms) / each_ms))
    nearest = min(abs(compute_ms(n) - wanted_ms) for n in (best, best + 1))
    assert off <= max(CLOSE * wanted_ms, nearest + 1e-9)
    assert len(looks) < 32
    assert len(set(looks[:-3])) == len(looks[:-3]), "nothing is measured twice"


def test_there_is_a_most_that_is_tried() -> None:
    assert find_iterations(lambda count: 1e-9 * count, 1.0, most=1000) == 1000
    assert find_iterations(lambda count: 0.0, 1.0, most=50) in range(1, 51)


def refused(call: Any) -> ConductorError:
    with pytest.raises(ConductorError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_layers": 0}, "bad_layers"),
        ({"n_layers": 4097}, "bad_layers"),
        ({"bytes_per_layer": 0}, "bad_layer_bytes"),
        ({"bytes_per_layer": -16}, "bad_layer_bytes"),
        ({"bytes_per_layer": 66}, "bad_layer_bytes"),
        ({"bytes_per_layer": 68}, "bad_layer_bytes"),
        ({"slots": 1}, "bad_slots"),
        ({"slots": 5}, "bad_slots"),
    ],
)
def test_a_bad_shape_is_refused(change: dict[str, int], reason: str) -> None:
    values = {"n_layers": 2, "bytes_per_layer": 64, "slots": 2} | change
    error = refused(lambda: Shape(**values))
    assert error.reason == reason
    assert error.code == "INVALID_ARGUMENT"
    (value,) = change.values()
    assert value in error.details.values()


@pytest.mark.parametrize(("iterations", "repeats"), [(-1, 1), (10_000_001, 1), (1, 0), (1, 1001)])
def test_a_bad_number_is_refused(iterations: int, repeats: int) -> None:
    shape = Shape(2, 64, 2)
    error = refused(lambda: measure_setting("cpu", shape, iterations, repeats))
    assert error.reason == ("bad_repeats" if iterations == 1 else "bad_iterations")


class Opens:
    """Counts payloads that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def make(*arguments: Any) -> SyntheticHost:
            self.count += 1
            return SyntheticHost(*arguments)

        monkeypatch.setattr(pipeline_payload, "SyntheticHost", make)


def test_more_than_there_is_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opens = Opens(monkeypatch)
    monkeypatch.setattr(pipeline_payload, "host_memory", lambda: HostMemory(1 << 30, 1 << 20))
    error = refused(lambda: measure_setting("cpu", Shape(8, 512 * KIB + 16, 2), 1, 1))
    assert error.reason == "host_memory_short"
    assert error.details == {"need_bytes": 2 * (512 * KIB + 16), "free_bytes": 1 << 20}
    error = refused(lambda: measure_setting("cpu", Shape(4096, 1 << 40, 2), 1, 1))
    assert error.reason == "host_memory_short"
    monkeypatch.setattr(pipeline_payload, "host_memory", lambda: HostMemory(1 << 60, 1 << 60))
    error = refused(lambda: measure_setting("cpu", Shape(4096, 1 << 40, 2), 1, 1))
    assert error.reason == "disk_short"
    assert error.details["need_bytes"] == 4096 << 40
    assert opens.count == 0
    measure_setting("cpu", Shape(2, 512 * KIB, 2), 1, 1)
    assert opens.count == 1


@pytest.mark.parametrize(
    ("load", "cores", "busy"),
    [
        (0.0, 2, False),
        (0.5, 2, False),
        (0.6, 2, True),
        (6.0, 8, False),
        (7.0, 8, True),
        (0, 1, True),
    ],
)
def test_a_busy_machine_is_said(load: float, cores: int, busy: bool) -> None:
    notes = busy_notes(load, cores)
    assert bool(notes) is busy
    assert all(f"{cores} cores" in note and f"load {load:.1f}" in note for note in notes)


def test_a_setting_has_all_its_figures() -> None:
    found = measure_setting("cpu", Shape(3, 64 * KIB, 2), 5, 2)
    assert "file" in found.where
    (row,) = found.rows
    assert (row["n_layers"], row["bytes_per_layer"], row["slots"]) == (3, 64 * KIB, 2)
    assert (row["iterations"], row["aim"]) == (5, None)
    assert len(row["unit_transfer_ms"]) == len(row["unit_compute_ms"]) == 3
    assert row["share"] == max(row["transfer_ms"], row["compute_ms"]) / row["overlapped_ms"]
    for spans in row["timelines"].values():
        assert sorted((span["stream"], span["unit"]) for span in spans) == [
            *[("compute", unit) for unit in range(3)],
            *[("transfer", unit) for unit in range(3)],
        ]
    assert json.loads(msgspec.json.encode(found))["rows"] == [row]


def test_iterations_are_found_if_none_are_given() -> None:
    (row,) = measure_setting("cpu", Shape(2, 64 * KIB, 2), 0, 1).rows
    assert row["aim"] == 1.0
    assert row["iterations"] >= 1


def test_a_grid_goes_as_far_as_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SMALL_GRID", ((2, 64 * KIB), (3, 32 * KIB)))
    monkeypatch.setattr(pipeline, "SMALL_RATIOS", (1.0, 4.0))
    found = measure_grid("cpu", 3, 1, 60.0)
    assert [(row["n_layers"], row["slots"], row["aim"]) for row in found.rows] == [
        (2, 3, 1.0),
        (2, 3, 4.0),
        (3, 3, 1.0),
        (3, 3, 4.0),
    ]
    assert not any("no time" in note for note in found.notes)
    assert list(found.seconds) == ["layers", "iterations", "passes"]
    # The others take less than the millisecond that is told, where nothing else runs.
    assert found.seconds["passes"] > 0
    news: list[str] = []
    short = measure_grid("cpu", 3, 1, 0.0, news.append)
    assert [(row["n_layers"], row["aim"]) for row in short.rows] == [(2, 1.0)]
    assert news == ["making layers", "1 of 4: 2 layers of 0.0625 MiB at C/T 1"]
    assert [note for note in short.notes if "no time" in note] == [
        "no time was left for C/T 1: 3 layers of 0.03125 MiB",
        "no time was left for C/T 4: 2 layers of 0.0625 MiB, 3 layers of 0.03125 MiB",
    ]


def test_what_others_took_tells_whether_there_is_time() -> None:
    large, small = Shape(64, MIB, 2), Shape(16, MIB, 2)
    budget = Budget(until_s=100.0)
    assert budget.allows(Aim(large, 4.0), 1000.0), "the first one always is"
    budget.note(large, 1.0, 8.0)
    assert budget.allows(Aim(large, 4.0), 79.0), "20 s: two and a half times as long"
    assert not budget.allows(Aim(large, 4.0), 81.0)
    assert budget.allows(Aim(small, 4.0), 94.0), "5 s: a quarter of the layers"
    assert not budget.allows(Aim(small, 4.0), 96.0)
    budget.note(small, 4.0, 1.0)
    assert budget.allows(Aim(small, 4.0), 98.0), "it is known now"
    assert budget.allows(Aim(large, 1.0), 91.0)


@pytest.mark.parametrize("large_first", [False, True])
def test_memory_is_taken_once_for_all_settings_that_fit(
    large_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = Opens(monkeypatch)
    sizes = [(3, 32 * KIB), (6, 64 * KIB), (4096, 1 << 50), (6, 32 * KIB)]
    monkeypatch.setattr(pipeline, "SMALL_GRID", sizes[::-1] if large_first else sizes)
    monkeypatch.setattr(pipeline, "SMALL_RATIOS", (1.0,))
    found = measure_grid("cpu", 2, 1, 60.0)
    assert [(row["n_layers"], row["bytes_per_layer"]) for row in found.rows] == [
        (3, 32 * KIB),
        (6, 32 * KIB),
        (6, 64 * KIB),
    ]
    assert all(len(row["unit_compute_ms"]) == row["n_layers"] for row in found.rows)
    assert opens.count == 1


def test_a_grid_goes_on_without_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SMALL_GRID", ((2, 64 * KIB), (4096, 1 << 50), (3, 32 * KIB)))
    monkeypatch.setattr(pipeline, "SMALL_RATIOS", (1.0,))
    found = measure_grid("cpu", 2, 1, 60.0)
    assert [row["n_layers"] for row in found.rows] == [2, 3]
    (failure,) = found.failures
    assert "4096 layers" in failure
    monkeypatch.setattr(pipeline, "SMALL_GRID", ((4096, 1 << 50),))
    assert refused(lambda: measure_grid("cpu", 2, 1, 60.0)).reason == "host_memory_short"


def test_wrong_results_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SyntheticHost):
        """Forgets its second layer, if it has three."""

        def work(self, unit: int, slot: Any) -> None:
            if unit != 1 or len(self._units) < 3:
                super().work(unit, slot)

    monkeypatch.setattr(pipeline_payload, "SyntheticHost", Wrong)
    monkeypatch.setattr(pipeline, "SMALL_GRID", ((2, 64 * KIB), (3, 64 * KIB)))
    monkeypatch.setattr(pipeline, "SMALL_RATIOS", (1.0,))
    with pytest.raises(DataLoss, match="unit 1"):
        measure_setting("cpu", Shape(3, 64 * KIB, 2), 1, 1)
    with pytest.raises(DataLoss, match="unit 1"):
        measure_grid("cpu", 2, 1, 60.0)


def test_the_process_prints_one_json_value(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--n-layers", "2", "--bytes-per-layer", "4096", "--compute-iters", "2"]
    assert __main__.main(["pipeline", *flags, "--repeats", "1"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["rows"][0]["iterations"] == 2
    assert __main__.main(["pipeline", *flags, "--slots", "9"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "bad_slots"


# --- the path of a GPU, on an emulated one ---


@pytest.fixture
def emulated(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    gpu = EmulatedCuda(kernels, seed=3)
    monkeypatch.setattr(cuda.Cuda, "of", lambda device: gpu)
    return gpu


def test_a_setting_on_a_gpu(emulated: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    # An emulated kernel takes a third of a second.
    monkeypatch.setattr(measure, "UNITS_MIN", 1)
    free_bytes = emulated.free_bytes
    found = measure_setting("cuda:0", Shape(1, 4096, 2), 4, 1)
    assert found.device_name == emulated.name
    assert "pinned" in found.where
    (row,) = found.rows
    assert row["iterations"] == 4
    assert min(row["unit_transfer_ms"] + row["unit_compute_ms"]) > 0
    assert emulated.free_bytes == free_bytes, "all is given back"


def test_more_than_a_gpu_has_is_refused_before_anything_is_made(emulated: EmulatedCuda) -> None:
    free_bytes = emulated.free_bytes
    size = free_bytes // 2 // 16 * 16 + 16
    error = refused(lambda: measure_setting("cuda:0", Shape(1, size, 2), 1, 1))
    assert error.reason == "device_memory_short"
    assert error.details == {"need_bytes": 2 * size, "free_bytes": free_bytes}
    assert emulated.launches == 0
