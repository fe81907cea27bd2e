"""What this host could serve, without serving: ``python -m vram_conductor.worker.probe``.

``host`` tells about library, GPUs and shared memory; ``estimate`` asks for dry runs of model
files; ``requantise`` writes a model anew. Each prints one JSON value, so that the command line
can ask without importing anything of the worker. Problems are values too: a host without a driver
is an answer.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from vram_conductor.protocol.errors import ConductorError, OutOfRange
from vram_conductor.protocol.limits import N_CTX_PAD
from vram_conductor.protocol.values import KVType, PoolShape
from vram_conductor.worker.engine import Estimate, Estimator
from vram_conductor.worker.llama.engine import LlamaEngine
from vram_conductor.worker.llama.library import library
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.requantise import requantise
from vram_conductor.worker.vmm import preload
from vram_conductor.worker.vram import NvmlSampler, load_nvml

SHARED_MEMORY = "/dev/shm"


def probe_host() -> dict[str, Any]:
    """Library build, GPUs and whether their memory can sleep, threads, shared memory, limits."""
    shm = shutil.disk_usage(SHARED_MEMORY) if Path(SHARED_MEMORY).is_dir() else None
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    gpus, problem = probe_gpus()
    return {
        "build": library().build,
        "gpu_offload": library().gpu_offload,
        "threads": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_total_bytes": shm.total if shm else 0,
        "shm_free_bytes": shm.free if shm else 0,
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "gpus": gpus,
        "gpu_problem": problem,
        "sleep": msgspec.to_builtins(preload.find(os.environ, driver=True)) if gpus else None,
    }


def probe_gpus() -> tuple[list[dict[str, Any]], str]:
    """Every GPU that NVML shows, with what others use of it now; or why there is none."""
    try:
        nvml = load_nvml()
        found: list[dict[str, Any]] = []
        while True:
            try:
                sampler = NvmlSampler(f"cuda:{len(found)}", nvml)
            except ConductorError as error:
                return found, "" if found else error.info.message
            info = msgspec.to_builtins(sampler.info())
            found.append(info | {"used_bytes": sampler.sample(0).used_bytes})
            sampler.close()
    except ConductorError as error:
        return [], error.info.message


def probe_models(
    paths: list[str], n_ctx: int, kv_type: KVType, fit_bytes: int | None
) -> list[dict[str, Any]]:
    """A dry run of each file on the cpu; an error is the answer for that file only."""
    engine = LlamaEngine(EngineOptions())
    try:
        return [
            {"path": path} | _dry_run(engine.estimator, path, n_ctx, kv_type, fit_bytes)
            for path in paths
        ]
    finally:
        engine.close()


def _dry_run(
    estimator: Estimator, path: str, n_ctx: int, kv_type: KVType, fit_bytes: int | None
) -> dict[str, Any]:
    """At ``n_ctx``, or at what the model was trained with if that is less."""

    def ask(room: int | None) -> Estimate:
        cells = -(-n_ctx // N_CTX_PAD) * N_CTX_PAD
        shape = PoolShape(cells=cells, slots=1, kv_type=kv_type)
        return estimator.estimate(path, Path(path).name, shape, n_ctx, room)

    try:
        try:
            result = ask(None)
        except OutOfRange as error:
            trained = error.details.get("n_ctx_train")
            if not isinstance(trained, int) or not 0 < trained < n_ctx:
                raise
            n_ctx = trained
            result = ask(None)
        if fit_bytes is not None:
            result = ask(max(0, fit_bytes - result.weights_bytes))
    except ConductorError as error:
        return {"error": msgspec.to_builtins(error.info)}
    return {
        "info": msgspec.to_builtins(result.info),
        "n_ctx": n_ctx,
        "weights_bytes": result.weights_bytes,
        "pool_bytes": result.pool_bytes,
        "state_bytes": result.state_bytes,
        "fit_cells": result.fit_cells,
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point; one JSON value on stdout."""
    parser = argparse.ArgumentParser(prog="python -m vram_conductor.worker.probe")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("host")
    estimate = verbs.add_parser("estimate")
    estimate.add_argument("path", nargs="+")
    estimate.add_argument("--n-ctx", type=int, default=4096)
    estimate.add_argument("--kv-type", default="f16", choices=["f16", "q8_0", "q4_0", "f32"])
    estimate.add_argument("--fit-bytes", type=int, help="weights and pool together")
    copy = verbs.add_parser("requantise")
    copy.add_argument("source")
    copy.add_argument("target")
    copy.add_argument("--kind", default="q8_0")
    args = parser.parse_args(argv)
    value: Any
    if args.verb == "host":
        value = probe_host()
    elif args.verb == "requantise":
        try:
            requantise(args.source, args.target, args.kind)
        except ConductorError as error:
            sys.stderr.write(f"{error.info.message}\n")
            return 1
        value = {"bytes": Path(args.target).stat().st_size}
    else:
        value = probe_models(args.path, args.n_ctx, args.kv_type, args.fit_bytes)
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
