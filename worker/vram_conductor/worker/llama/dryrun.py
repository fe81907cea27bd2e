"""Dry runs: what a model and its pools would take, without allocating them.

``no_alloc=True, load_mode=0`` makes llama.cpp read the metadata and plan every buffer. Vocabulary
and tensor list are read for real, so a dry model costs host memory (tens of MB with a large
vocabulary) and most of the time; the last few are kept, and then a probe is one context, some
milliseconds. Recurrent caches are allocated even in a dry run and freed with it: on a GPU in host
memory, where the preload library is there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import (
    FailedPrecondition,
    Internal,
    OutOfRange,
    ResourceExhausted,
    Unimplemented,
)
from vram_conductor.protocol.values import ModelInfo, PoolShape
from vram_conductor.worker.engine import Estimate
from vram_conductor.worker.llama.context import create_context
from vram_conductor.worker.llama.identity import ModelFiles, model_files
from vram_conductor.worker.llama.info import read_dimensions, read_info
from vram_conductor.worker.llama.loading import load_model
from vram_conductor.worker.llama.loglines import ROUNDING_BYTES, unknown_buffers
from vram_conductor.worker.llama.logs import Capture
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.repacking import second_copy_bytes
from vram_conductor.worker.llama.scratch import Dimensions, Gpu, scratch_bytes
from vram_conductor.worker.llama.sizes import (
    DryPool,
    allocated,
    dry_pool,
    largest_fitting,
    scale_slots,
    state_bytes,
)
from vram_conductor.worker.llama.tensors import Tensor, cuda_weights_bytes, read_tensors
from vram_conductor.worker.vmm.library import Vmm

DRY_MODELS_MAX = 3
POOLS_MAX = 4096
SCALED_SLOTS = 2
"""With more slots than this the sizes of a recurrent model's pool on a GPU are scaled up."""

RECURRENT_BYTES_MAX = 1 << 30
"""A dry run would really allocate the recurrent caches: beyond this it is refused."""


@dataclass(frozen=True)
class ModelFacts:
    """What a dry load tells; outlives the dry model."""

    info: ModelInfo
    weights_bytes: int
    n_swa: int
    recurrent: bool
    tensors: tuple[Tensor, ...]
    size: Dimensions


class DryRunner:
    """Estimates in this process. Thread-safe; one dry run at a time.

    Its caches are keyed by model (device, inode, size, mtime_ns) and pool shape; all that an
    estimate depends on besides (micro-batch, flash attention, window mode, layers on the
    device, the device itself, the library build) is fixed for the life of the process.
    """

    def __init__(
        self, options: EngineOptions, gpu: Gpu | None = None, vmm: Vmm | None = None
    ) -> None:
        """``gpu``: on cuda, what a live context takes beyond its buffers depends on it. ``vmm``:
        what keeps dry contexts off the device."""
        self._options = options
        self._gpu = gpu
        self._vmm = vmm
        self._lock = threading.Lock()
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._facts: dict[str, ModelFacts] = {}
        self._pools: OrderedDict[tuple[str, PoolShape], DryPool] = OrderedDict()

    def estimate(
        self, path: str, name: str, shape: PoolShape, n_ctx: int, fit_bytes: int | None
    ) -> Estimate:
        """See ``engine.Estimator``.

        Raises:
            NotFound: ``no_such_model``.
            InvalidArgument: ``bad_model``.
            Unimplemented: ``unsupported_model``.
            OutOfRange: ``n_ctx_beyond_training``.
            FailedPrecondition: ``kv_type_unsupported``.
            ResourceExhausted, Internal: ``estimate_failed``.
        """
        with self._lock:
            files, facts = self._find(path)
            trained = facts.info.n_ctx_train
            if trained and n_ctx > trained:
                raise OutOfRange(
                    "n_ctx_beyond_training",
                    f"n_ctx={n_ctx} is beyond the {trained} tokens that {name} was trained with; "
                    f"ask for at most {trained}",
                    n_ctx=n_ctx,
                    n_ctx_train=trained,
                )
            cached = (files.id, shape) in self._pools
            pool = self._pool(files, facts, shape)
            fit = None if fit_bytes is None else self._fit(files, facts, shape, fit_bytes)
        return Estimate(
            info=msgspec.structs.replace(facts.info, name=name, path=path),
            shape=shape,
            weights_bytes=facts.weights_bytes,
            kv_bytes=pool.sizes.kv_bytes,
            compute_bytes=pool.sizes.compute_bytes,
            recurrent_bytes=pool.sizes.recurrent_bytes,
            state_bytes=state_bytes(pool.caches, n_ctx, n_swa=facts.n_swa),
            fit_cells=fit,
            cached=cached,
            scratch_bytes=self._scratch_bytes(facts, shape, flash=pool.flash),
        )

    def _scratch_bytes(self, facts: ModelFacts, shape: PoolShape, *, flash: bool) -> int:
        if self._gpu is None:
            return 0
        size = replace(
            facts.size,
            tokens=self._options.batch_tokens,
            outputs=shape.slots,
            cells=shape.cells,
            flash=flash,
        )
        return scratch_bytes(facts.tensors, size, self._gpu)

    def describe(self, path: str, name: str) -> ModelInfo:
        """First look at a file; raises as :meth:`estimate` does."""
        with self._lock:
            _, facts = self._find(path)
        return msgspec.structs.replace(facts.info, name=name, path=path)

    def close(self) -> None:
        """Free the dry models."""
        with self._lock:
            while self._models:
                ll.llama_model_free(self._models.popitem()[1])

    def _fit(self, files: ModelFiles, facts: ModelFacts, shape: PoolShape, fit_bytes: int) -> int:
        trained = facts.info.n_ctx_train or limits.N_CTX_MAX
        per_slot = -(-trained // limits.N_CTX_PAD) * limits.N_CTX_PAD

        def pool_bytes(cells: int) -> int:
            return self._pool(files, facts, replace_cells(shape, cells)).sizes.total_bytes

        return largest_fitting(pool_bytes, fit_bytes, per_slot * shape.slots)

    def _find(self, path: str) -> tuple[ModelFiles, ModelFacts]:
        files = model_files(path)
        if files.id not in self._facts:
            model = self._dry_model(files)
            info = read_info(model, files, path)
            tensors = tuple(read_tensors(*files.paths))
            self._facts[files.id] = ModelFacts(
                info=info,
                weights_bytes=self._weights_bytes(model, tensors),
                n_swa=int(ll.llama_model_n_swa(model)),
                recurrent=info.rollback == "none",
                tensors=tensors,
                size=read_dimensions(model, info.arch),
            )
        return files, self._facts[files.id]

    def _weights_bytes(self, model: Any, tensors: tuple[Tensor, ...]) -> int:
        """Upper bound of the weights on the device, as a real load would log them."""
        kind = self._options.device_kind
        if kind == "cuda":
            size = cuda_weights_bytes(tensors)
        else:
            size = int(ll.llama_model_size(model)) + second_copy_bytes(tensors)
        # Two buffers at most (on cpu: plain and repacked), each printed with a rounding error.
        return allocated(size, kind) + (2 * ROUNDING_BYTES if kind == "cpu" else 0)

    def _dry_model(self, files: ModelFiles) -> Any:
        model = self._models.get(files.id)
        if model is None:
            model, _ = load_model(files, self._options, dry=True)
            self._models[files.id] = model
            if len(self._models) > DRY_MODELS_MAX:
                ll.llama_model_free(self._models.popitem(last=False)[1])
        self._models.move_to_end(files.id)
        return model

    def _pool(self, files: ModelFiles, facts: ModelFacts, shape: PoolShape) -> DryPool:
        """Sizes of a pool, from the cache or from a dry context."""
        found = self._pools.get((files.id, shape))
        if found is None:
            model = self._dry_model(files)
            if facts.recurrent and shape.slots > SCALED_SLOTS and self._gpu is not None:
                found = self._scaled(model, shape)
            else:
                if facts.recurrent and shape.slots > 1:
                    self._check_recurrent(model, shape)
                found = self._dry_context(model, shape)
            self._pools[files.id, shape] = found
            if len(self._pools) > POOLS_MAX:
                self._pools.popitem(last=False)
        return found

    def _scaled(self, model: Any, shape: PoolShape) -> DryPool:
        """A recurrent model's pool from smaller ones: their caches are allocated even in a dry
        run, and on a GPU that memory is promised to others."""
        one = self._dry_context(model, msgspec.structs.replace(shape, slots=1))
        two = self._dry_context(model, msgspec.structs.replace(shape, slots=SCALED_SLOTS))
        return scale_slots(one, two, shape.slots, self._options.device_kind)

    def _check_recurrent(self, model: Any, shape: PoolShape) -> None:
        one = self._dry_context(model, PoolShape(limits.N_CTX_PAD, 1, shape.kv_type))
        need = one.sizes.recurrent_bytes * shape.slots
        if need > RECURRENT_BYTES_MAX:
            raise ResourceExhausted(
                "estimate_failed",
                f"the recurrent state of {shape.slots} slots takes {need} bytes, too much to "
                f"try out ({RECURRENT_BYTES_MAX}); ask for fewer slots",
                recurrent_bytes=need,
                limit_bytes=RECURRENT_BYTES_MAX,
            )

    def _dry_context(self, model: Any, shape: PoolShape) -> DryPool:
        context, capture = self._create(model, shape)
        if not context:
            raise self._refusal(model, shape, capture.problem())
        has_memory = bool(ll.llama_get_memory(context))
        ll.llama_free(context)
        if not has_memory:
            raise Unimplemented(
                "unsupported_model",
                "this model keeps no context (it is an embedder); choose a text generator",
            )
        unknown = unknown_buffers(capture.texts())
        if unknown:
            raise Internal(
                "estimate_failed",
                f"llama.cpp announces a buffer of an unknown kind: {unknown[0]}",
            )
        return dry_pool(capture.texts(), self._options.device_kind, shape.kv_type)

    def _create(self, model: Any, shape: PoolShape) -> tuple[Any | None, Capture]:
        """Recurrent caches are really allocated: on a GPU, all memory may be promised to others."""
        with nullcontext() if self._vmm is None else self._vmm.on_host():
            return create_context(model, self._options, shape)

    def _refusal(self, model: Any, shape: PoolShape, problem: str) -> Exception:
        plain = PoolShape(limits.N_CTX_PAD, 1, "f16")
        if shape.kv_type not in ("f16", "f32"):
            context, _ = self._create(model, plain)
            if context:
                ll.llama_free(context)
                return FailedPrecondition(
                    "kv_type_unsupported",
                    f"this model cannot have a {shape.kv_type} cache: {problem}; use kv_type f16",
                    kv_type=shape.kv_type,
                )
        return Internal(
            "estimate_failed",
            f"a pool of {shape.cells} cells cannot be planned: "
            f"{problem or 'llama.cpp gave no reason'}",
            cells=shape.cells,
        )


def replace_cells(shape: PoolShape, cells: int) -> PoolShape:
    """``shape`` with another number of cells."""
    return msgspec.structs.replace(shape, cells=cells)
