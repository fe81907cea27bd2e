"""A device that cannot be served is refused where it is written, not by a worker that dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from vram_conductor.protocol.config import load_config
from vram_conductor.protocol.errors import InvalidArgument

CPU = '[[device]]\nid = "cpu"\nkind = "cpu"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CPU + "threads = -3", "threads is -3; it must be 0 (all cores) to 512"),
        (CPU + "threads = 513", "threads is 513"),
        (CPU + "n_ubatch = -1", "n_ubatch is -1"),
        (CPU + "pinned_cap = -1", "pinned_cap: -1 is out of range"),
        (CPU + 'pinned_cap = "-1 GiB"', "pinned_cap: '-1 GiB' is no size"),
        (CPU + "capacity = -5", "capacity: -5 is out of range"),
        (CPU + 'host_cap = "much"', "host_cap: 'much' is no size"),
        (CPU + CPU, "two devices have the id 'cpu'"),
    ],
)
def test_a_device_that_makes_no_sense(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "conductor.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_config(path)
    assert caught.value.reason == "bad_config"
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_the_ends_of_the_ranges_are_served(tmp_path: Path) -> None:
    path = tmp_path / "conductor.toml"
    path.write_text(CPU + "threads = 512\npinned_cap = 0\n" + CPU.replace('"cpu"', '"cpu:1"', 1))
    assert [device.threads for device in load_config(path).device] == [512, 0]
