"""``bench pipeline --model``: a real model whose layers travel through a window.

The pipeline, and llama.cpp in every way it is compared with, run one after the other in processes
of their own: each has the device to itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vram_conductor.client.bench_layers_figures import add_figures
from vram_conductor.client.bench_layers_found import Beside, Layers, LayersReport
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import Setting, ask_worker
from vram_conductor.protocol.errors import ConductorError, Internal

BATCH_MOST_CUDA = 512
BATCH_MOST_CPU = 8

OWN_SHARE = 0.6
"""Of the time, for the pipeline itself at the most; llama.cpp's ways share what it leaves."""

TEXT_SHARE = 0.3

WAYS_CUDA = {
    "partial": "llama.cpp with the same GPU memory",
    "cpu": "llama.cpp on the CPU",
    "all": "llama.cpp with everything on the GPU",
}
WAYS_CPU = {"cpu": "llama.cpp on the CPU"}

LLAMA_SEQUENCES_MOST = 256
"""A context of llama.cpp has no more."""

BESIDE = (1, 64, 8, 256)
"""Batches at which llama.cpp is measured: those first that say most."""

BESIDE_CPU_MOST = 64
"""Its CPU is compute-bound long before."""

T = TypeVar("T")


def measure(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """The first of the setting's models; ``extra``: ``batch`` (the largest; None: as is right for
    the device), ``window_layers``, ``resident_layers``.

    Raises:
        InvalidArgument: ``too_few_models``, ``bad_value``, ``bad_window``, ``bad_resident``.
        ConductorError: what the worker's side failed with.
    """
    setting.need(1)
    asking = _Asking(setting, say)
    report.data["phases"] = asking.phases
    # A file that cannot be computed is refused before anything is measured.
    report.data["model"] = asking.layers("describe", "--describe")["model"]
    with tempfile.TemporaryDirectory(prefix="vmc-layers-") as folder:
        reference = asking.text(Path(folder), report)
        say("measuring the pipeline")
        seconds = str(int(OWN_SHARE * setting.left_s))
        value = asking.layers("pipeline", "--seconds", seconds, *reference)
    found = LayersReport(_typed(value, Layers))
    report.device_name = found.layers.device_name
    report.notes += found.layers.notes
    try:
        asking.beside(found, report)
    finally:
        add_figures(report, found, on_cuda=setting.on_cuda)


class _Asking:
    """Asks the worker's side.

    Attributes:
        phases: what was asked → ``seconds``, and of its ``parts`` as far as the worker says.
    """

    def __init__(self, setting: Setting, say: Callable[[str], None]) -> None:
        self._setting, self._say = setting, say
        self._common = ["--device", setting.device, "--model", setting.models[0].path]
        self.phases: dict[str, dict[str, Any]] = {}

    def _ask(self, phase: str, *arguments: str, **options: Any) -> Any:
        began = time.monotonic()
        timed = self.phases[phase] = {"seconds": 0.0, "parts": {}}
        try:
            value = ask_worker(*arguments, **options)
            timed["parts"] = value.get("phases", {})
            return value
        finally:
            timed["seconds"] = round(time.monotonic() - began, 3)

    def layers(self, phase: str, *more: str) -> Any:
        """The pipeline."""
        extra = self._setting.extra
        # With "=": a number below 0 would pass for a flag.
        arguments = [*self._common, f"--batches={','.join(map(str, self._batches()))}"]
        for flag, key in (("--window-layers", "window_layers"), ("--resident", "resident_layers")):
            if key in extra:
                arguments.append(f"{flag}={extra[key]}")
        if self._setting.rounds:
            arguments += ["--repeats", str(self._setting.rounds)]
        threads = self._setting.threads
        # NumPy's products read it once, when NumPy is loaded.
        env = {"OPENBLAS_NUM_THREADS": str(threads)} if threads else None
        timeout_s = self._setting.left_s + 60
        return self._ask(phase, "layers", *arguments, *more, timeout_s=timeout_s, env=env)

    def _batches(self) -> Sequence[int]:
        usual = BATCH_MOST_CUDA if self._setting.on_cuda else BATCH_MOST_CPU
        most = self._setting.extra.get("batch")
        # What makes no sense is for the worker to refuse.
        return powers_of_two(usual if most is None else most)

    def text(self, folder: Path, report: BenchReport) -> list[str]:
        """llama.cpp's logits of a text; [] where it cannot be asked, or there is no time."""
        if not self._setting.left_s:
            report.notes.append("no time was left for the logits beside llama.cpp's")
            return []
        self._say("asking llama.cpp for its logits")
        model, threads = self._setting.models[0].path, str(self._setting.threads)
        arguments = ["--model", model, "--threads", threads, "--folder", str(folder)]
        arguments += ["--seconds", str(int(TEXT_SHARE * self._setting.left_s))]
        try:
            self._ask("text", "layers-text", *arguments, timeout_s=self._setting.left_s + 60)
        except ConductorError as error:
            report.failures.append(f"no agreement: {error.info.message}")
            return []
        return ["--reference", str(folder)]

    def beside(self, found: LayersReport, report: BenchReport) -> None:
        """llama.cpp in all ways."""
        ways = WAYS_CUDA if self._setting.on_cuda else WAYS_CPU
        own_bytes = {row.batch: row.own_bytes for row in found.layers.decode}
        if not own_bytes:
            return
        for at, (way, text) in enumerate(ways.items()):
            self._say(f"measuring {text}")
            seconds = self._setting.left_s / (len(ways) - at)
            batches = batches_beside(own_bytes, way)
            if max(batches) < max(own_bytes):
                report.notes.append(f"{text} is measured up to batch {max(batches)}")
            device = "cpu" if way == "cpu" else self._setting.device
            arguments = ["--device", device, "--model", self._setting.models[0].path]
            arguments += ["--batches", ",".join(f"{it}:{own_bytes[it]}" for it in batches)]
            arguments += ["--n-ctx", str(found.layers.setting["n_ctx"])]
            arguments += ["--prompt-tokens", str(found.layers.prefill.tokens)]
            arguments += ["--threads", str(self._setting.threads)]
            arguments += ["--seconds", str(int(0.9 * seconds)), *self._partial(way)]
            try:
                value = self._ask(way, "layers-beside", *arguments, timeout_s=seconds + 60)
            except ConductorError as error:
                report.failures.append(f"{text}: {error.info.message}")
                continue
            found.beside[way] = _typed(value, Beside)
            report.notes += [f"{text}: {note}" for note in found.beside[way].notes]

    def _partial(self, way: str) -> list[str]:
        return ["--partial"] if way == "partial" else []


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 … and ``most`` itself. *Pure.*"""
    return sorted({1 << at for at in range(most.bit_length())} | {most})


def batches_beside(measured: Collection[int], way: str) -> list[int]:
    """At which of the measured batches llama.cpp is measured, those first that say most: its
    largest, too. *Pure.*"""
    most = BESIDE_CPU_MOST if way == "cpu" else LLAMA_SEQUENCES_MOST
    # Where only larger ones were measured, it says itself that it has no room for them.
    possible = [batch for batch in measured if batch <= most] or [min(measured)]
    return list(dict.fromkeys([*(it for it in BESIDE if it in possible), max(possible)]))


def _typed(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Internal("bench_failed", f"bench layers says nonsense: {error}") from None
