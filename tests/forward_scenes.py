"""The layers' kernels together, on whatever GPU there is, against the same layers in NumPy.

A scene is a class of tests that take ``make_gpu``; tests/worker and tests/gpu inherit from it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from quantised_models import Quantised, make_quantised

from vram_conductor.worker.pipeline.assembly import Plan, assemble_host
from vram_conductor.worker.pipeline.assembly_cuda import assemble_on
from vram_conductor.worker.pipeline.forward import Batch, Capacity
from vram_conductor.worker.pipeline.gpu import Gpu
from vram_conductor.worker.pipeline.layer_engine import LayerEngine
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.tensor_types import TensorType

MakeGpu = Callable[[], Gpu]

ONE_TOKEN_ERROR = 2e-4
"""Of logits, relative to their spread, where only the KV cache is rounded (to f16)."""

TOKENS_ERROR = 5e-3
"""The same where the factors of every product of several tokens are rounded to f16, too."""


SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff": 96}
LLAMA = Quantised("llama", TensorType.Q4_0, **SMALL)
QWEN2 = Quantised("qwen2", TensorType.Q8_0, **SMALL)
GEMMA3 = Quantised("gemma3", TensorType.Q4_1, n_layer=7, n_swa=8, scaling="linear", **SMALL)
"""Its sixth layer sees everything, the others the last 8 positions, with other rotations."""

every_architecture = pytest.mark.parametrize(
    "spec", [LLAMA, QWEN2, GEMMA3], ids=lambda spec: spec.arch
)


@contextmanager
def engine(
    make_gpu: MakeGpu | None, spec: Quantised, capacity: Capacity, resident: tuple[int, ...] = ()
) -> Generator[LayerEngine]:
    """On a GPU, or on the host."""
    plan = Plan(ModelFile.open(make_quantised(spec)), capacity, 2, resident)
    assembly = assemble_on(make_gpu(), plan) if make_gpu else assemble_host(plan)
    with LayerEngine(plan, assembly) as it:
        yield it


def off(found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """The root mean square of the difference in spreads of the right ones."""
    return float(np.sqrt(np.mean((found - right) ** 2)) / right.std())


class ForwardScenes:
    """Random models; every batch is computed on both, and all logits compared."""

    def compare(
        self,
        make_gpu: MakeGpu,
        spec: Quantised,
        batches: list[Batch],
        capacity: Capacity | None = None,
        resident: tuple[int, ...] = (),
    ) -> None:
        room = capacity or Capacity(n_ctx=96, sequences=3, tokens_max=64, wanted_max=64)
        with (
            engine(make_gpu, spec, room, resident) as there,
            engine(None, spec, room) as here,
        ):
            limit = ONE_TOKEN_ERROR
            for batch in batches:
                if len(batch) > 1:
                    limit = TOKENS_ERROR  # also of what follows and reads what they left
                found, right = there.step(batch), here.step(batch)
                assert found.shape == right.shape
                if len(batch.wanted):
                    assert off(found, right) < limit, f"{len(batch)} tokens"

    @staticmethod
    def tokens(count: int, seed: int = 0) -> NDArray[np.int64]:
        return np.random.default_rng(seed).integers(0, 320, count)

    def decode(self, count: int) -> list[Batch]:
        return [Batch.of([token], at) for at, token in enumerate(self.tokens(count))]

    @every_architecture
    def test_one_token_after_the_other(self, make_gpu: MakeGpu, spec: Quantised) -> None:
        self.compare(make_gpu, spec, self.decode(12))

    @every_architecture
    def test_a_prompt_and_what_follows(self, make_gpu: MakeGpu, spec: Quantised) -> None:
        prompt = Batch.of(self.tokens(30), 0, wanted=range(30))
        more = [Batch.of([7], 30), Batch.of([8, 9, 10], 31, wanted=[0, 2])]
        self.compare(make_gpu, spec, [prompt, *more])

    @pytest.mark.parametrize("kind", TensorType, ids=lambda kind: kind.name)
    def test_every_tensor_type(self, make_gpu: MakeGpu, kind: TensorType) -> None:
        batches = [Batch.of([1], 0), Batch.of(self.tokens(9), 1, wanted=range(9))]
        self.compare(make_gpu, Quantised("llama", kind, n_layer=1), batches)

    def test_sequences_do_not_see_each_other(self, make_gpu: MakeGpu) -> None:
        prompts = Batch.of(
            self.tokens(30),
            [*range(12), *range(10), *range(8)],
            [2] * 12 + [0] * 10 + [1] * 8,
            wanted=[11, 21, 29],
        )
        each = Batch.of([4, 5, 6], [8, 12, 10], [1, 2, 0], wanted=[0, 1, 2])
        again = Batch.of([4, 5], [3, 13], [1, 2], wanted=[1, 0])
        self.compare(make_gpu, QWEN2, [prompts, each, again])

    @pytest.mark.parametrize("scaling", ["linear", "yarn", "llama3"])
    def test_every_scaling_of_rotations(self, make_gpu: MakeGpu, scaling: Any) -> None:
        spec = replace(LLAMA, scaling=scaling)
        self.compare(make_gpu, spec, [Batch.of(self.tokens(20), 0), Batch.of([1], 20)])

    def test_a_prompt_in_pieces_of_which_nothing_is_wanted(self, make_gpu: MakeGpu) -> None:
        first = Batch.of(self.tokens(10), 0, wanted=[])
        second = Batch.of(self.tokens(10, seed=1), 10)
        self.compare(make_gpu, GEMMA3, [first, second])

    def test_a_head_much_larger_than_a_layer(self, make_gpu: MakeGpu) -> None:
        spec = replace(LLAMA, n_vocab=4001, n_layer=1)
        batches = [Batch.of([1], 0), Batch.of([2, 3, 4], 1, wanted=[0, 1, 2])]
        self.compare(make_gpu, spec, batches)

    @pytest.mark.parametrize("resident", [(0,), (1, 2), (0, 1, 2)])
    def test_layers_that_stay(self, make_gpu: MakeGpu, resident: tuple[int, ...]) -> None:
        self.compare(make_gpu, LLAMA, self.decode(3), resident=resident)

    def test_the_best_token_is_told_without_the_logits(self, make_gpu: MakeGpu) -> None:
        spec, room = replace(LLAMA, n_vocab=1500), Capacity(32, 1, 8, 8)
        with engine(make_gpu, spec, room) as it:
            for batch in (Batch.of([1], 0), Batch.of([2, 3, 4, 5], 1, wanted=[3, 0, 1])):
                logits = it.step(batch)
                best = it.step_best(batch)
                assert best.tolist() == logits.argmax(axis=1).tolist()

    def test_a_pass_whose_result_nobody_takes_is_computed_all_the_same(
        self, make_gpu: MakeGpu
    ) -> None:
        room = Capacity(32, 1, 8, 1)
        first, second = Batch.of(self.tokens(5), 0), Batch.of(self.tokens(4, seed=1), 5)
        with engine(None, LLAMA, room) as here:
            here.step(first)
            right = here.step(second)
        for _ in range(2):
            with engine(make_gpu, LLAMA, room) as there:
                forward = there._open().forward
                for batch in (first, second):
                    forward.begin(batch)
                    there._pipeline.run(there._compute)
                assert off(forward.logits(), right) < TOKENS_ERROR
