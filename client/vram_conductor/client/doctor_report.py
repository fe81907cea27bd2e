"""What ``conductor doctor`` found, as text. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vram_conductor.client.text import size, table
from vram_conductor.protocol.config import Config, parse_bytes

SHM_MIN_BYTES = 256 << 20
_CUDA_BUILD = (
    "llama-cpp-python was built without CUDA; in a clone of the project, with nvcc on the path: "
    "CMAKE_ARGS=-DGGML_CUDA=on make setup"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: Literal["ok", "note", "problem"]
    topic: str
    text: str


def host_findings(host: dict[str, Any]) -> list[Finding]:
    """From the probe's answer about this box."""
    found = [Finding("ok", "llama.cpp", f"{host['build']}, {host['threads']} threads")]
    for gpu in host["gpus"]:
        free = gpu["total_bytes"] - gpu.get("reserved_bytes", 0) - gpu["used_bytes"]
        text = f"{gpu['device']} {gpu['name']}: {size(free)} free of {size(gpu['total_bytes'])}"
        found.append(Finding("ok", "gpu", text))
    if not host["gpus"]:
        found.append(Finding("note", "gpu", host["gpu_problem"] or "none"))
    elif not host["gpu_offload"]:
        found.append(Finding("problem", "gpu", _CUDA_BUILD))
    shm = host["shm_free_bytes"]
    text = f"{size(shm)} free of {size(host['shm_total_bytes'])} in /dev/shm, for parked KV"
    if shm < SHM_MIN_BYTES:
        text += "; containers: --shm-size=4g, or set worker.arena_dir"
        found.append(Finding("problem", "shm", text))
    else:
        found.append(Finding("ok", "shm", text))
    return found


def device_findings(config: Config, host: dict[str, Any]) -> list[Finding]:
    """Configured devices that this box does not have, or not so large."""
    here = {gpu["device"] for gpu in host["gpus"]}
    found: list[Finding] = []
    for device in config.device:
        if not device.managed:
            continue
        if device.kind == "cuda" and device.id not in here:
            text = f"{device.id} is in the configuration and not on this box"
            found.append(Finding("problem", "device", text))
        elif device.kind == "cpu" and parse_bytes(device.capacity) > host["memory_bytes"]:
            text = (
                f"{device.id}: capacity {size(parse_bytes(device.capacity))} is more than the "
                f"{size(host['memory_bytes'])} of this box"
            )
            found.append(Finding("problem", "device", text))
    return found


def sleep_findings(config: Config, host: dict[str, Any]) -> list[Finding]:
    """By which mechanism each GPU's memory changes hands, and why by that one."""
    found: list[Finding] = []
    managed = {device.id: device for device in config.device if device.managed}
    for gpu in host["gpus"]:
        name = gpu["device"]
        here: dict[str, Any] = host.get("sleep") or {}
        device = managed.get(name)
        if config.device and device is None:
            continue
        if device is not None and device.sleep == "off":
            text = f"{name}: state-swap (models are unloaded and loaded again): device sleep = off"
            found.append(Finding("ok", "sleep", text))
        elif here.get("path"):
            text = f"{name}: vmm-sleep (models sleep and wake at fixed addresses): {here['path']}"
            found.append(Finding("ok", "sleep", text))
        else:
            why = here.get("why") or "nothing is known of the preload library"
            text = f"{name}: state-swap (models are unloaded and loaded again): {why}"
            found.append(Finding("note", "sleep", text))
    return found


def render(
    findings: Sequence[Finding], fits: Sequence[dict[str, Any]], n_ctx: int, width: int
) -> str:
    """The findings, then what would fit, in at most ``width`` columns."""
    marks = {"ok": "ok", "note": "note", "problem": "FAIL"}
    rows = [[marks[finding.state], finding.topic, finding.text] for finding in findings]
    parts = [table(["", "what", "found"], rows, width=width, wrap=(2,))]
    if fits:
        parts.append(f"what would fit, alone on its device, KV f16 (pool: at n_ctx {n_ctx}):")
        parts.append(_fit_table(fits, width))
    return "\n\n".join([parts[0], "\n".join(parts[1:])]).rstrip()


def _fit_table(fits: Sequence[dict[str, Any]], width: int) -> str:
    rows: list[list[str]] = []
    for fit in fits:
        head = [fit["device"], size(fit["capacity_bytes"]), fit["model"]]
        if "error" in fit:
            rows.append([*head, "-", "-", fit["error"]["message"]])
        else:
            sizes = [size(fit["weights_bytes"]), size(fit["pool_bytes"])]
            rows.append([*head, *sizes, _largest(fit)])
    header = ["device", "may hold", "model", "weights", "pool", "largest n_ctx"]
    return table(header, rows, right=(1, 3, 4), width=width, wrap=(5,))


def _largest(fit: dict[str, Any]) -> str:
    cells, trained = fit["fit_cells"], fit["n_ctx_train"]
    if not cells:
        return "does not fit"
    return f"{trained} (its maximum)" if trained and cells >= trained else str(cells)
