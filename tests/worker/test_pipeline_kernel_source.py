"""The text that is compiled, and how many threads it gets."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.pipeline import launch_geometry
from vram_conductor.worker.pipeline.kernel_source import NEEDS, kernel_source, matvec_name
from vram_conductor.worker.pipeline.tensor_types import TensorType

names = st.lists(st.sampled_from(sorted(NEEDS)), min_size=1)


@given(names)
def test_every_file_stands_once_and_behind_what_it_needs(wanted: list[str]) -> None:
    source = kernel_source(*wanted, defines="#define FIRST 1\n")
    assert "#define FIRST 1\n" in source.partition("#line")[0]
    order = re.findall(r'^#line 1 "(.*)"$', source, re.MULTILINE)
    assert len(order) == len(set(order))
    assert set(order) >= set(wanted)
    for at, name in enumerate(order):
        assert set(NEEDS[name]) <= set(order[:at])


def test_nothing_is_included() -> None:
    assert "#include" not in kernel_source(*NEEDS)


@given(st.sets(st.sampled_from(TensorType), min_size=1))
def test_the_types_that_are_wanted_have_their_kernels(kinds: set[TensorType]) -> None:
    first, _, _ = kernel_source("matvec.cu", kinds=kinds).partition("\n")
    chosen = re.findall(r"DO\((\w+), (\w+)\)", first)
    assert sorted(name for _, name in chosen) == sorted(kind.name for kind in kinds)
    assert {f"matvec_{lower}" for lower, _ in chosen} == {matvec_name(kind) for kind in kinds}


@given(st.integers(1, 300_000))
def test_a_grid_covers_all_rows_and_no_block_is_idle(rows: int) -> None:
    geometry = launch_geometry.matvec(rows)
    (blocks,), (threads,) = geometry.grid, geometry.block
    a_block = threads // launch_geometry.WARP * launch_geometry.MATVEC_ROWS
    assert (blocks - 1) * a_block < rows <= blocks * a_block
