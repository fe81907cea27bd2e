"""Pictures of what the benches found. Matplotlib is imported only here, and only when asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vram_conductor.client.bench_report import BenchReport
from vram_conductor.protocol.errors import FailedPrecondition

_GOOD, _BAD, _PLAIN, _LIMIT = "#2f7d4f", "#b3392f", "#3b6ea5", "#444444"


def load_pyplot() -> Any:
    """``matplotlib.pyplot`` without a display.

    Raises:
        FailedPrecondition: ``matplotlib_missing``.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise FailedPrecondition(
            "matplotlib_missing",
            "pictures need matplotlib: pip install 'vram-conductor[plot]', or leave out --plot",
        ) from None


def plot(report: BenchReport, path: Path) -> None:
    """Write the bench's picture as PNG.

    Raises:
        FailedPrecondition: ``matplotlib_missing``.
    """
    pyplot = load_pyplot()
    _PLOTS[report.bench](pyplot, report)
    pyplot.gcf().text(0.01, 0.01, _caption(report), fontsize=7, color="#666666")
    pyplot.savefig(path, dpi=110)
    pyplot.close("all")


def _caption(report: BenchReport) -> str:
    models = ", ".join(model["name"] for model in report.setting.get("models", []))
    return f"conductor bench {report.bench} on {report.device} {report.device_name}; {models}"


def _parallel(pyplot: Any, report: BenchReport) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=[1, 1.6])
    names, alone, both = (report.data[key] for key in ("models", "alone", "both"))
    places = range(len(names))
    left.bar([at - 0.2 for at in places], alone, 0.4, label="alone", color="#9db8d6")
    left.bar([at + 0.2 for at in places], both, 0.4, label="all at once", color=_PLAIN)
    left.set_xticks(list(places), names)
    left.set_ylabel("tokens/s")
    left.legend()
    for index, streams in enumerate(report.data["timelines"]):
        style = "-" if index else "--"
        for at, stream in enumerate(streams):
            what = f"{stream['agent']}, {'at once' if index else 'in turn'}"
            right.plot(stream["ms"], stream["tokens"], style, color=f"C{at}", label=what)
    right.set_xlabel("ms since the first job was sent")
    right.set_ylabel("tokens")
    right.legend(fontsize=7)
    ratio = report.figure("ratio")
    assert ratio is not None
    figure.suptitle(f"several models in one process: {ratio.value:.2f} x their rate in turn")
    figure.tight_layout(rect=(0, 0.04, 1, 0.98))


_PLOTS: dict[str, Callable[[Any, BenchReport], None]] = {"parallel": _parallel}
