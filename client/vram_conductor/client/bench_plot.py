"""Pictures of what the benches found. Matplotlib is imported only here, and only when asked."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from vram_conductor.client.bench_pictures import PICTURES
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument


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
            "pictures need matplotlib: pip install matplotlib, or leave out --plot",
        ) from None


def check_picture(name: str) -> None:
    """Raises InvalidArgument ``bad_output`` for what is no name of a picture."""
    if Path(name).suffix.lower() != ".png":
        raise InvalidArgument(
            "bad_output",
            f"--plot {name}: pictures are PNG; name a file that ends with .png",
            path=name,
        )


def plot(report: BenchReport, path: Path) -> None:
    """Write the bench's picture as PNG.

    Raises:
        FailedPrecondition: ``matplotlib_missing``.
    """
    pyplot = load_pyplot()
    PICTURES[report.bench](pyplot, report)
    pyplot.gcf().text(0.01, 0.01, _caption(report), fontsize=7, color="#666666")
    pyplot.savefig(path, dpi=110)
    pyplot.close("all")


def _caption(report: BenchReport) -> str:
    models = ", ".join(model["name"] for model in report.setting.get("models", []))
    where = f"{report.device} {report.device_name}".strip()
    return f"conductor bench {report.bench} on {where}" + (f"; {models}" if models else "")
