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
    assert source.startswith("#define FIRST 1\n")
    order = re.findall(r'^#line 1 "(.*)"$', source, re.MULTILINE)
    assert len(order) == len(set(order))
    assert set(order) >= set(wanted)
    for at, name in enumerate(order):
        assert set(NEEDS[name]) <= set(order[:at])


def test_nothing_is_included() -> None:
    assert "#include" not in kernel_source(*NEEDS)


def test_every_type_has_its_kernel() -> None:
    source = kernel_source("matvec.cu")
    for kind in TensorType:
        assert f"({matvec_name(kind)}, {kind.name})" in source


@given(st.integers(1, 300_000))
def test_a_grid_covers_all_rows_and_no_block_is_idle(rows: int) -> None:
    geometry = launch_geometry.matvec(rows)
    (blocks,), (threads,) = geometry.grid, geometry.block
    a_block = threads // launch_geometry.WARP * launch_geometry.MATVEC_ROWS
    assert (blocks - 1) * a_block < rows <= blocks * a_block
