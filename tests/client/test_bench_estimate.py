"""How estimates are judged: never under, over by the larger of 2 % and 16 MiB at most."""

from __future__ import annotations

from typing import Any

import pytest

from vram_conductor.client import bench_estimate
from vram_conductor.client.bench_estimate import OVER_BYTES, Point, measure
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import Setting
from vram_conductor.protocol.errors import Internal

GIB = 1 << 30


def row(over_bytes: int, used_bytes: int = GIB, slots: int = 1) -> dict[str, Any]:
    point = Point("1.2B", "llama", 8192, "f16", slots, used_bytes + over_bytes, used_bytes)
    return {name: getattr(point, name) for name in Point.__struct_fields__}


def judged(monkeypatch: pytest.MonkeyPatch, rows: Any, device: str = "cuda:0") -> BenchReport:
    asked: list[tuple[str, ...]] = []

    def answer(*arguments: str, timeout_s: float) -> Any:
        asked.append(arguments)
        return {"rows": rows, "device_name": "a GPU", "notes": ["one note"]}

    monkeypatch.setattr(bench_estimate, "ask_worker", answer)
    report = BenchReport("estimate", device)
    measure(Setting(device, ()), report, lambda text: None)
    (arguments,) = asked
    assert arguments[:3] == ("estimates", "--device", device)
    assert "--folder" in arguments
    return report


def verdicts(report: BenchReport) -> list[bool | None]:
    found = [report.figure(key) for key in ("points", "under", "beyond")]
    return [figure.reached if figure else None for figure in found]


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        (0, [True, True, True]),
        (OVER_BYTES, [True, True, True]),
        (GIB // 50, [True, True, True]),
        (GIB // 50 + 2048, [True, True, False]),
        (-1024, [True, False, True]),
    ],
)
def test_the_worst_point_decides(
    over: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = judged(monkeypatch, [row(0)] * 9 + [row(over)])
    assert verdicts(report) == expected
    assert report.notes == ["one note"]
    assert len(report.data["points"]) == 10


def test_small_ones_may_be_over_by_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged(monkeypatch, [row(OVER_BYTES, used_bytes=1 << 20)] * 10)
    assert verdicts(report) == [True, True, True]
    report = judged(monkeypatch, [row(OVER_BYTES + 2048, used_bytes=1 << 20)] * 10)
    assert verdicts(report) == [True, True, False]


def test_few_points_prove_little(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(judged(monkeypatch, [row(0)] * 3)) == [False, True, True]
    assert verdicts(judged(monkeypatch, [])) == [False, None, None]
    assert verdicts(judged(monkeypatch, [row(-5)], device="cpu")) == [None, None, None]


@pytest.mark.parametrize("rows", [None, [{"model": 3}], "x"])
def test_nonsense_is_an_error(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Internal, match="nonsense"):
        judged(monkeypatch, rows)
