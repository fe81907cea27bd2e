"""``conductor doctor``: what is installed, which devices there are, what would fit, what to do."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import zmq

from vram_conductor.client.defaults import find_config
from vram_conductor.client.doctor_report import (
    Finding,
    device_findings,
    host_findings,
    render,
    sleep_findings,
)
from vram_conductor.client.endpoint import default_endpoint
from vram_conductor.client.model_files import here as is_here
from vram_conductor.client.model_places import model_places
from vram_conductor.client.output import Output
from vram_conductor.client.probing import INSTALL, estimates, probe
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, plural, size
from vram_conductor.protocol.config import (
    Config,
    client_endpoint,
    load_config,
    overlay,
    parse_bytes,
)
from vram_conductor.protocol.errors import ConductorError, Unavailable
from vram_conductor.protocol.status import StatusReport

_BASE = ("vram-conductor", "pyzmq", "msgspec")
_WORKER = ("llama-cpp-python", "numpy", "jinja2", "xxhash", "psutil", "nvidia-ml-py")
_CUDA = ("cupy-cuda12x", "cupy-cuda13x")
FIT_N_CTX = 4096


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register ``doctor``."""
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="what is installed, which devices there are, what would fit",
        description="Looks at this box; changes nothing. Exit status 1 if something is broken.",
    )
    doctor.set_defaults(run=_run)


def _run(args: argparse.Namespace, output: Output) -> int:
    findings = [*software(), _compiler()]
    fits: list[dict[str, Any]] = []
    with output.waiting("looking for a broker") as waiting:
        config = _config(args, findings)
        if config is not None:
            findings.append(_broker(args, config))
        config = config or Config()
        try:
            waiting.now = "asking the worker's library about this box"
            host = probe("host")
            findings += [*host_findings(host), *device_findings(config, host)]
            findings += sleep_findings(config, host)
            waiting.now = "estimating what would fit"
            fits = what_fits(config, host)
        except ConductorError as error:
            findings = without_worker(findings, error, config)
    output.value({"findings": findings, "fits": fits})
    output.text(render(findings, fits, FIT_N_CTX, output.width))
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def software() -> list[Finding]:
    """Python and the packages of every part."""
    found = [Finding("ok", "python", f"{platform.python_version()}, libzmq {zmq.zmq_version()}")]
    base = {name: _version(name) for name in _BASE}
    worker = {name: _version(name) for name in _WORKER}
    cuda = {name: version for name in _CUDA if (version := _version(name))}
    have = {**base, **worker, **cuda}
    text = ", ".join(f"{name} {version}" for name, version in have.items() if version)
    found.append(Finding("ok", "packages", text))
    missing = [name for name, version in worker.items() if not version]
    if missing:
        text = f"{', '.join(missing)} missing: {INSTALL}"
        found.append(Finding("note", "packages", f"for a worker {text}"))
    return found


def without_worker(findings: list[Finding], error: ConductorError, config: Config) -> list[Finding]:
    """The probe failed: a problem, unless this box is to run no worker. Said once. *Pure.*"""
    rest = [item for item in findings if (item.state, item.topic) != ("note", "packages")]
    if error.reason != "worker_missing" or any(device.managed for device in config.device):
        return [*rest, Finding("problem", "worker", error.info.message)]
    if len(rest) < len(findings):
        return findings
    return [*findings, Finding("note", "worker", error.info.message)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _compiler() -> Finding:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    text = compiler or "none: needed to build llama-cpp-python and the preload library"
    return Finding("ok" if compiler else "note", "compiler", text)


def _config(args: argparse.Namespace, findings: list[Finding]) -> Config | None:
    try:
        path = find_config(args.config)
        config = overlay(load_config(path), os.environ)
        text = str(path) if path else "none: `conductor up` makes one that describes this box"
        findings.append(Finding("ok", "config", text))
        return config
    except ConductorError as error:
        findings.append(Finding("problem", "config", error.info.message))
        return None


def _broker(args: argparse.Namespace, config: Config) -> Finding:
    endpoint = client_endpoint(config.broker) if args.config else default_endpoint()
    try:
        with Conductor(endpoint, key=config.client.key, connect_timeout_s=1.0) as conductor:
            trip = duration(conductor.ping())
            text = f"answers at {conductor.endpoint} within {trip}"
            return Finding("ok", "broker", text + leases_text(conductor.status()))
    except Unavailable as error:
        return Finding("note", "broker", error.info.message)
    except ConductorError as error:
        return Finding("problem", "broker", error.info.message)


def leases_text(report: StatusReport) -> str:
    """What programs outside hold of each device, while agents may wait. *Pure.*"""
    parts: list[str] = []
    for device in report.devices:
        lines = [x for x in device.promised.lines if x.key.startswith("lease:")]
        if lines:
            total = size(sum(line.bytes for line in lines))
            parts.append(f"; {plural(len(lines), 'lease')} hold {total} of {device.device}")
    return "".join(parts)


def devices(config: Config, host: dict[str, Any]) -> list[tuple[str, int]]:
    """Devices and how many bytes each may promise: the configuration's, else this host's."""
    sizes = {
        gpu["device"]: gpu["total_bytes"] - gpu.get("reserved_bytes", 0) for gpu in host["gpus"]
    }
    if config.device:
        found: list[tuple[str, int]] = []
        for device in config.device:
            own, given = sizes.get(device.id, 0), parse_bytes(device.capacity)
            if device.kind == "cuda":
                given = min(given or own, own)
            found.append((device.id, given * device.admission_percent // 100))
        return [(name, capacity) for name, capacity in found if capacity]
    return list(sizes.items()) or [("cpu", host["memory_bytes"] // 4)]


def what_fits(config: Config, host: dict[str, Any]) -> list[dict[str, Any]]:
    """For every model that is here and every device: the largest context that would fit.

    Raises:
        ConductorError: as the probe; ``bad_catalogue``, ``bad_size``.
    """
    places = model_places(config.worker)
    here = {
        str(path): entry.name
        for entry in places.files.load().model
        if is_here(entry, path := places.path(entry))
    }
    fits: list[dict[str, object]] = []
    for device, capacity in devices(config, host) if here else []:
        for answer in estimates([Path(path) for path in here], FIT_N_CTX, fit_bytes=capacity):
            row: dict[str, object] = {"device": device, "capacity_bytes": capacity}
            row["model"] = here[answer["path"]]
            info: dict[str, Any] = answer.get("info") or {}
            row["n_ctx_train"] = info.get("n_ctx_train")
            fits.append(row | {k: v for k, v in answer.items() if k not in ("path", "info")})
    return fits
