"""``conductor doctor``: what is installed, which devices there are, what would fit, what to do."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from vram_conductor.client.defaults import find_config
from vram_conductor.client.output import Output
from vram_conductor.client.probing import estimates, probe
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size, table
from vram_conductor.protocol.catalogue import load_catalogue, model_path, packaged_catalogue
from vram_conductor.protocol.config import (
    Config,
    client_endpoint,
    load_config,
    models_dir,
    parse_bytes,
)
from vram_conductor.protocol.errors import ConductorError

_PACKAGES = ("pyzmq", "msgspec", "llama-cpp-python", "numpy", "nvidia-ml-py", "cupy-cuda12x")
_FIT_N_CTX = 4096
_SHM_MIN_BYTES = 256 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``state`` is ok, note or problem."""

    state: str
    topic: str
    text: str


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``doctor``."""
    doctor = commands.add_parser(
        "doctor", parents=[common], help="what is installed, which devices, what would fit"
    )
    doctor.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    findings = [*_software(args), *_broker(args)]
    config = _config(args, findings)
    fits: list[dict[str, Any]] = []
    try:
        host = probe("host")
        findings += _host(host)
        fits = _fits(config, host)
    except ConductorError as error:
        findings.append(Finding("problem", "worker", error.info.message))
    output.value({"findings": findings, "fits": fits})
    marks = {"ok": "ok  ", "note": "note", "problem": "FAIL"}
    for finding in findings:
        output.text(f"{marks[finding.state]}  {finding.topic:<10} {finding.text}")
    if fits:
        output.text(f"\nwhat would fit, alone on its device, KV f16 (at n_ctx {_FIT_N_CTX}):")
        output.text(_fit_table(fits))
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def _software(args: argparse.Namespace) -> list[Finding]:
    found = [Finding("ok", "python", f"{platform.python_version()}, libzmq {zmq.zmq_version()}")]
    for name in _PACKAGES:
        try:
            found.append(Finding("ok", "package", f"{name} {importlib.metadata.version(name)}"))
        except importlib.metadata.PackageNotFoundError:
            extra = {"cupy-cuda12x": "cuda"}.get(name, "worker")
            found.append(
                Finding("note", "package", f"{name} is not here: the [{extra}] extra brings it")
            )
    compiler = shutil.which("cc") or shutil.which("gcc")
    text = compiler or "none: needed only to build llama-cpp-python from source"
    found.append(Finding("ok" if compiler else "note", "compiler", text))
    return found


def _config(args: argparse.Namespace, findings: list[Finding]) -> Config:
    try:
        path = find_config(args.config)
        config = load_config(path)
        text = str(path) if path else "none: `conductor up` makes one that describes this box"
        findings.append(Finding("ok", "config", text))
        return config
    except ConductorError as error:
        findings.append(Finding("problem", "config", error.info.message))
        return Config()


def _broker(args: argparse.Namespace) -> list[Finding]:
    try:
        config = load_config(find_config(args.config))
        with Conductor(client_endpoint(config.broker), connect_timeout_s=1.0) as conductor:
            trip = duration(conductor.ping())
            return [Finding("ok", "broker", f"answers at {conductor.endpoint} within {trip}")]
    except ConductorError as error:
        return [Finding("note", "broker", error.info.message)]


def _host(host: dict[str, Any]) -> list[Finding]:
    found = [Finding("ok", "llama.cpp", f"{host['build']}, {host['threads']} threads")]
    for gpu in host["gpus"]:
        free = gpu["total_bytes"] - gpu.get("reserved_bytes", 0) - gpu["used_bytes"]
        text = f"{gpu['device']} {gpu['name']}: {size(free)} free of {size(gpu['total_bytes'])}"
        found.append(Finding("ok", "gpu", text))
    if not host["gpus"]:
        found.append(Finding("note", "gpu", host["gpu_problem"]))
    elif not host["gpu_offload"]:
        found.append(
            Finding(
                "problem",
                "gpu",
                "llama-cpp-python was built without CUDA: CMAKE_ARGS=-DGGML_CUDA=on "
                "pip install --force-reinstall --no-cache-dir llama-cpp-python==0.3.36",
            )
        )
    shm = host["shm_free_bytes"]
    text = f"{size(shm)} free of {size(host['shm_total_bytes'])} in /dev/shm, for parked KV"
    if shm < _SHM_MIN_BYTES:
        text += "; containers: --shm-size=4g, or set worker.arena_dir"
        found.append(Finding("problem", "shm", text))
    else:
        found.append(Finding("ok", "shm", text))
    return found


def _devices(config: Config, host: dict[str, Any]) -> list[tuple[str, int]]:
    """Devices and their capacities: the configuration's, else this host's."""
    sizes = {
        gpu["device"]: gpu["total_bytes"] - gpu.get("reserved_bytes", 0) for gpu in host["gpus"]
    }
    if config.device:
        found = []
        for device in config.device:
            capacity = parse_bytes(device.capacity) or sizes.get(device.id, 0)
            found.append((device.id, capacity * device.admission_percent // 100))
        return found
    return list(sizes.items()) or [("cpu", host["memory_bytes"] // 4)]


def _fits(config: Config, host: dict[str, Any]) -> list[dict[str, Any]]:
    """For every model that is here and every device: the largest context that would fit."""
    file = Path(config.worker.catalogue) if config.worker.catalogue else packaged_catalogue()
    folder = models_dir(config.worker)
    here = {
        str(path): entry.name
        for entry in load_catalogue(file).model
        if (path := model_path(entry, folder, file.parent)).exists()
    }
    fits = []
    for device, capacity in _devices(config, host) if here else []:
        for answer in estimates([Path(path) for path in here], _FIT_N_CTX, fit_bytes=capacity):
            row = {"device": device, "capacity_bytes": capacity, "model": here[answer["path"]]}
            fits.append(row | {k: v for k, v in answer.items() if k not in ("path", "info")})
    return fits


def _fit_table(fits: list[dict[str, Any]]) -> str:
    rows = []
    for fit in fits:
        if "error" in fit:
            rows.append([fit["device"], fit["model"], "-", "-", fit["error"]["message"]])
            continue
        largest = str(fit["fit_cells"]) if fit["fit_cells"] else "does not fit"
        weights, pool = size(fit["weights_bytes"]), size(fit["pool_bytes"])
        fitting = f"{largest} in {size(fit['capacity_bytes'])}"
        rows.append([fit["device"], fit["model"], weights, pool, fitting])
    header = ["device", "model", "weights", "pool", "largest n_ctx"]
    return table(header, rows, right=(2, 3))
