"""A first look at the GPU with models of a few hundred kilobytes.

The first kernels of a process take memory that stays until it ends: their code, and the local
memory of all threads together (68 MiB on an H200). Taken before ``base`` is measured, it belongs
to ``base``, instead of to whichever model happens to come first; hence batches of all sizes that
have kernels of their own, on empty and on filled caches, the usual shapes of attention, matrices
whose rows do not divide evenly, and what sleeping and waking launches. The last model has plain
matrices: what its context gives back is what cuBLAS takes per context.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import KVType, PoolShape
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.samples import F16, Sample, write_sample
from vram_conductor.worker.llama.scratch import Gpu
from vram_conductor.worker.vmm.library import Vmm

log = logging.getLogger(__name__)

CUBLAS_BYTES = 128 << 20
"""Taken where the measurement makes no sense, because others came or went meanwhile."""

_CUBLAS_RANGE = (1 << 20, 1 << 30)
_CELLS = 1024
_DEEP = 512
"""Tokens that lie in the cache before the batches are tried again: attention over more of them is
split among more blocks, and other kernels put their parts together."""

ALL_SIZES = (*range(1, 9), 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 512)
"""Batches that matrix products have kernels of their own for (mmvq.cu, mmq.cu)."""

FEW_SIZES = (1, 2, 4, 8, 16, 32, 512)
"""The same for attention (fattn.cu)."""


SHAPES = (Sample(4, 4), Sample(4, 1), Sample(8, 1), Sample(4, 2, 128), Sample(8, 2, 128))
"""Query heads per key: each has kernels of its own (``ggml_cuda_flash_attn_ext_mma_f16``)."""

UNEVEN = Sample(9, 3)
"""As many rows as are no multiple of 128 are multiplied by other kernels (``need_check`` in
mmq.cuh)."""

WIDE = Sample(16, 2, embd=1024, arch="qwen2")
"""Rows of 1024 and more are normalised by other kernels (norm.cu)."""


class Device(Protocol):
    """``device.CudaDevice``, or a stand-in."""

    sm_count: int
    compute: int

    def used_bytes(self) -> int: ...


def calibrate(device: Device, options: EngineOptions, vmm: Vmm | None = None) -> Gpu:
    """Warm the process up and find out what scratch depends on. Once, before anything is loaded.

    Args:
        vmm: through which weights and pools will sleep.

    Raises:
        ConductorError: ``load_failed``, ``pool_failed``, ``decode_failed``: the GPU cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="vram-conductor-") as folder:
        path = Path(folder) / "sample.gguf"

        def run(sample: Sample, kv_type: KVType, sizes: Sequence[int]) -> int:
            write_sample(path, sample)
            return _given_back(path, kv_type, sizes, device.used_bytes, options)

        run(Sample(), "f16", ALL_SIZES)
        run(Sample(), "q8_0", FEW_SIZES)
        for sample in SHAPES:
            run(sample, "f16", FEW_SIZES)
        run(UNEVEN, "f16", ALL_SIZES)
        run(WIDE, "f16", FEW_SIZES)
        if vmm is not None:
            write_sample(path, Sample())
            _rehearse(path, options, vmm)
        cublas_bytes = run(Sample(kind=F16), "f16", FEW_SIZES)
    if not _CUBLAS_RANGE[0] <= cublas_bytes <= _CUBLAS_RANGE[1]:
        log.warning(
            "a context with cuBLAS seems to take %d bytes: another process came or went; "
            "%d are taken for granted",
            cublas_bytes,
            CUBLAS_BYTES,
        )
        cublas_bytes = CUBLAS_BYTES
    return Gpu(device.sm_count, device.compute, cublas_bytes)


def _given_back(
    path: Path,
    kv_type: KVType,
    sizes: Sequence[int],
    used_bytes: Callable[[], int],
    options: EngineOptions,
) -> int:
    """What a warm context of the sample gives back beyond its buffers when it is closed."""
    model = LlamaModel(str(path), path.name, options)
    try:
        pool = model.open_pool(PoolShape(cells=_CELLS, slots=1, kv_type=kv_type))
        try:
            for depth in (0, min(_DEEP, options.batch_tokens)):
                if depth:
                    pool.decode([(0, np.zeros(depth, np.int32), 0, True)])
                for size in sizes:
                    ids = np.zeros(min(size, options.batch_tokens, _CELLS - depth), np.int32)
                    pool.decode([(0, ids, depth, True)])
                    pool.truncate(0, depth)
                pool.truncate(0, 0)
            pool.warm_up()
            before = used_bytes()
        finally:
            pool.close()
        return before - used_bytes() - pool.measured_bytes
    finally:
        model.close()


def _rehearse(path: Path, options: EngineOptions, vmm: Vmm) -> None:
    """Copy out and in, sleep and wake once: what the driver loads for that belongs to ``base``,
    too. A device that cannot do it says so when it matters."""
    try:
        model = LlamaModel(str(path), path.name, options, vmm=vmm)
        try:
            pool = model.open_pool(PoolShape(cells=_CELLS, slots=1))
            try:
                pool.decode([(0, np.zeros(8, np.int32), 0, True)])
                state = bytearray(pool.state_bytes(0))
                pool.get_state(0, memoryview(state))
                if model.sleepable and pool.sleepable:
                    model.back_up()
                    pool.sleep()
                    model.sleep()
                    model.wake()
                    pool.wake()
                pool.set_state(0, memoryview(state))
                pool.decode([(0, np.zeros(1, np.int32), 8, True)])
                pool.synchronize()
            finally:
                pool.close()
        finally:
            model.close()
    except ConductorError as error:
        log.warning("sleeping and waking were tried out and failed: %s", error.info.message)
