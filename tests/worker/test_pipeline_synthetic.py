"""The synthetic payload: right results pass, wrong ones do not, on the host and by the kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.device import EmulatedCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vram_conductor.protocol.errors import DataLoss
from vram_conductor.worker.pipeline.runner import Pipeline
from vram_conductor.worker.pipeline.schedule import Schedule
from vram_conductor.worker.pipeline.synthetic import PARTS, PIECE, Synthetic
from vram_conductor.worker.pipeline.synthetic_cuda import SyntheticCuda


def filled(payload: Synthetic, unit: int = 0) -> NDArray[np.uint8]:
    data = np.zeros(payload.unit_bytes, np.uint8)
    payload.fill(unit, data)
    return data


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300_000), st.integers(0, 200), st.integers(0, 20))
def test_what_the_host_computes_is_right(n_bytes: int, iterations: int, unit: int) -> None:
    payload = Synthetic(unit + 1, n_bytes, iterations)
    data = filled(payload, unit)
    payload.check(unit, payload.compute(data), data)


def test_points_neither_fade_nor_grow_in_a_million_iterations() -> None:
    payload = Synthetic(1, 4096, 1_000_000)
    data = filled(payload)
    payload.check(0, payload.compute(data), data)


def test_a_unit_of_more_pieces_than_parts() -> None:
    payload = Synthetic(1, 4 * PIECE * (PARTS + 3) + 16, 3)
    data = filled(payload)
    results = payload.compute(data)
    payload.check(0, results, data)
    assert results[0, 0] > 1.5 * results[5, 0]


def test_one_piece_of_another_unit_is_found() -> None:
    payload = Synthetic(2, 4 * PIECE * 40, 64)
    data, other = filled(payload), filled(payload, 1)
    mixed = data.copy()
    mixed[4 * PIECE * 7 : 4 * PIECE * 8] = other[4 * PIECE * 7 : 4 * PIECE * 8]
    with pytest.raises(DataLoss, match="part 7:") as caught:
        payload.check(0, payload.compute(mixed), data)
    assert caught.value.reason == "wrong_result"


@pytest.mark.parametrize("iterations", [63, 65])
def test_an_iteration_more_or_less_is_found(iterations: int) -> None:
    data = filled(Synthetic(1, 4 * PIECE, 64))
    with pytest.raises(DataLoss):
        Synthetic(1, 4 * PIECE, 64).check(
            0, Synthetic(1, 4 * PIECE, iterations).compute(data), data
        )


def test_poison_is_found() -> None:
    payload = Synthetic(1, 4 * PIECE, 1)
    data = filled(payload)
    results = payload.compute(data)
    results[PARTS - 1, 1] = np.nan
    with pytest.raises(DataLoss, match=f"part {PARTS - 1}: computed nan"):
        payload.check(0, results, data)


def test_the_same_bytes_are_laid_out_as_other_units(kernels: Path) -> None:
    gpu = EmulatedCuda(kernels, seed=2)
    synthetic = SyntheticCuda(gpu, Synthetic(2, 4 * PIECE, 3), slots=2)
    smaller = Synthetic(3, 2 * PIECE, 4)
    synthetic.lay_out(smaller)
    pipeline = Pipeline(synthetic.streams, Schedule(3, 2))
    pipeline.run(synthetic.work)
    pipeline.synchronise()
    synthetic.check()
    pipeline.run(lambda unit, slot: synthetic.work((unit + 1) % 3, slot))
    pipeline.synchronise()
    with pytest.raises(DataLoss):
        synthetic.check()
    synthetic.close()
    gpu.close()


def test_the_kernel_computes_every_unit_of_a_pipeline(kernels: Path) -> None:
    gpu = EmulatedCuda(kernels, seed=1)
    synthetic = SyntheticCuda(gpu, Synthetic(3, 4 * PIECE * 3 + 48, 5), slots=2)
    pipeline = Pipeline(synthetic.streams, Schedule(3, 2))
    for run, iterations in ((pipeline.run, 5), (pipeline.run_serial, 60)):
        synthetic.iterate(iterations)
        synthetic.poison()
        with pytest.raises(DataLoss, match="unit 0"):
            synthetic.check()
        run(synthetic.work)
        pipeline.synchronise()
        synthetic.check()
    assert gpu.launches == 6
    synthetic.iterate(61)
    with pytest.raises(DataLoss, match="unit 0"):
        synthetic.check()
    synthetic.close()
    gpu.close()
