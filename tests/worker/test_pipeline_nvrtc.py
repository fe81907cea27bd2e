"""Every kernel becomes machine code for the oldest and the newest GPU that is spoken of, Pascal (a
GTX 1080) and Hopper, and none keeps in memory what belongs in registers."""

from __future__ import annotations

from importlib.resources import files
from itertools import chain

import nvrtc
import pytest

from vram_conductor.worker.pipeline.attention_plan import Heads
from vram_conductor.worker.pipeline.kernel_source import NEEDS, kernel_source

ARCHITECTURES = ("sm_61", "sm_90")
SHARED_BYTES = 48 << 10
"""Static shared memory that a block of any GPU can have."""

SPILLED_BYTES = 64
"""A thread may keep a few words outside the registers that its block's size leaves it, no array."""

SHAPES = (Heads(9, 3, 64), Heads(4, 1, 256), Heads(32, 8, 128), Heads(14, 2, 64), Heads(4, 4, 32))
"""Of real models' attention, and a small one's."""

DEFINES = {"attention.cu": tuple(shape.defines for shape in SHAPES)}
"""What is defined before a file, where that is anything: each of several ways."""

PARTS = set(chain.from_iterable(NEEDS.values()))
"""Files that are compiled with others."""

SLOW = {"matmul.cu"}


def test_all_files_are_known() -> None:
    folder = files("vram_conductor.worker.pipeline.kernels")
    assert {file.name for file in folder.iterdir() if file.name.endswith(".cu")} == set(NEEDS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(NEEDS.keys() - PARTS)
    ],
)
def test_a_file_becomes_machine_code(name: str, arch: str) -> None:
    for defines in DEFINES.get(name, ("",)):
        source = kernel_source(name, defines=defines)
        compiled = nvrtc.compile_cubin(source, arch)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert compiled.usage, "no kernel came out"
        for kernel, usage in compiled.usage.items():
            assert usage.spilled_bytes <= SPILLED_BYTES, f"{kernel}: {usage}"
            assert usage.shared_bytes <= SHARED_BYTES, f"{kernel}: {usage}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_broken_kernel_does_not(arch: str) -> None:
    broken = 'extern "C" __global__ void broken() { undeclared = 1; }'
    source = f'{kernel_source("norm.cu")}\n#line 7 "broken.cu"\n{broken}'
    with pytest.raises(nvrtc.CompileError, match=r'(?s)broken\.cu\(7\): error.*"undeclared"'):
        nvrtc.compile_cubin(source, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_a_kernel_takes_is_seen(arch: str) -> None:
    # 128 sums at once, where a block of 1024 threads has 64 registers for each.
    source = """
    extern "C" __global__ void __launch_bounds__(1024) takes(float* x, int n) {
        __shared__ float all[1024];
        all[threadIdx.x] = x[n];
        __syncthreads();
        float own[128] = {};
        for (int at = 0; at < n; ++at)
            for (int i = 0; i < 128; ++i) own[i] = fmaf(own[i], x[at + i], all[at]);
        for (int i = 0; i < 128; ++i) x[threadIdx.x + i] = own[i];
    }"""
    usage = nvrtc.compile_cubin(source, arch).usage["takes"]
    assert usage.shared_bytes == 4096
    assert 32 < usage.registers <= 64
    assert usage.spilled_bytes > 128
