"""The CPU's stand-in for a GPU: what kernels rely on, and that their mistakes are seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.fenced import FencedMemory
from cuda_on_cpu.kernels import KernelError, Kernels, compile_kernels

SOURCE = r"""
#define OFFSET(T, NAME) \
    extern "C" __global__ void NAME(T* y, T by, int n) { \
        const int at = blockIdx.x * blockDim.x + threadIdx.x; \
        if (at < n) y[at] += by; \
    }
OFFSET(float, offset_float)
OFFSET(int, offset_int)

extern "C" __global__ void __launch_bounds__(128) block_sum(const float* x, float* y, int n) {
    extern __shared__ float parts[];
    __shared__ float total;
    parts[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int at = 0; at < blockDim.x; ++at) total += parts[at];
    }
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

extern "C" __global__ void forgets_a_barrier(const float* x, float* y) {
    extern __shared__ float parts[];
    parts[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = parts[(threadIdx.x + 1) % blockDim.x];
}

extern "C" __global__ void tiles(const float* x, float* y, int n, int forgets) {
    __shared__ float tile[64];
    float sum = 0.0f;
    for (int at = 0; at < n; ++at) {
        tile[threadIdx.x] = x[at * 64 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 64; i += 32) sum += __shfl_xor_sync(~0u, tile[threadIdx.x % 32 + i], 5);
        if (!forgets) __syncthreads();
    }
    y[threadIdx.x] = sum;
}

extern "C" __global__ void warp_sums(const float* x, float* y, int* votes) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = x[at];
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    y[at] = __shfl_sync(~0u, sum, 0) + 1000.0f * __shfl_down_sync(~0u, x[at], 1);
    votes[at] = __ballot_sync(~0u, x[at] > 0);
}

extern "C" __global__ void half_warps(const float* x, float* y) {
    const unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
    float sum = x[threadIdx.x];
    for (int by = 8; by; by /= 2) sum += __shfl_xor_sync(mask, sum, by, 16);
    y[threadIdx.x] = sum;
}

extern "C" __global__ void product(const unsigned short* a, const unsigned short* b, float* d) {
    const int group = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
    const auto two = [](const unsigned short* at) { return at[0] | unsigned(at[1]) << 16; };
    const unsigned left[4] = {two(a + group * 16 + pair), two(a + (group + 8) * 16 + pair),
                              two(a + group * 16 + pair + 8), two(a + (group + 8) * 16 + pair + 8)};
    const unsigned right[2] = {two(b + group * 16 + pair), two(b + group * 16 + pair + 8)};
    float sums[4] = {1, 1, 1, 1};
    mma_16816(sums, left, right, sums);
    for (int at = 0; at < 4; ++at) d[(group + at / 2 * 8) * 8 + pair + at % 2] = sums[at];
}

extern "C" __global__ void not_all_reach() { if (threadIdx.x < 5) return; __syncwarp(); }
extern "C" __global__ void two_barriers() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}
extern "C" __global__ void divides(int* x, int by) { x[0] /= by; }
extern "C" __global__ void misaligned(const unsigned char* x, float* y) {
    *y = *reinterpret_cast<const float*>(x + 2);
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return compile_kernels(SOURCE, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def x() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(5).normal(size=256).astype(np.float32)


def test_every_thread_of_every_block_runs_once(kernels: Kernels) -> None:
    y, numbers = np.zeros(100, np.float32), np.arange(100, dtype=np.int32)
    kernels.launch("offset_float", (4, 1, 1), (32,), [y, np.float32(1.5), np.int32(90)])
    kernels.launch("offset_int", (1,), (128,), [numbers.ctypes.data, np.int32(-7), np.int32(100)])
    assert y.tolist() == [1.5] * 90 + [0.0] * 10
    assert numbers.tolist() == list(range(-7, 93))


def test_a_block_shares_memory_and_waits(kernels: Kernels, x: np.ndarray) -> None:
    y = np.zeros_like(x)
    kernels.launch("block_sum", (2,), (128,), [x, y, np.int32(256)], shared_bytes=512)
    assert np.allclose(y, np.repeat(x.reshape(2, 128).sum(axis=1), 128), atol=1e-5)


def test_a_forgotten_barrier_shows(kernels: Kernels, x: np.ndarray) -> None:
    y = np.zeros_like(x)
    kernels.launch("forgets_a_barrier", (1,), (256,), [x, y], shared_bytes=1024)
    wrong = ~(y == np.roll(x, -1))
    assert 64 < wrong.sum() < 192
    assert np.isnan(y[wrong]).all()


def test_a_warp_runs_ahead_of_another(kernels: Kernels) -> None:
    x = np.random.default_rng(7).normal(size=(8, 64)).astype(np.float32)
    expected = np.tile(x.sum(0).reshape(2, 32).sum(0)[np.arange(32) ^ 5], 2)
    for forgets in (0, 1):
        y = np.zeros(64, np.float32)
        kernels.launch("tiles", (1,), (64,), [x, y, np.int32(8), np.int32(forgets)])
        assert np.allclose(y, expected, atol=1e-5) != forgets


def test_a_warp_exchanges(kernels: Kernels, x: np.ndarray) -> None:
    y, votes = np.zeros_like(x), np.zeros(256, np.int32)
    kernels.launch("warp_sums", (2,), (128,), [x, y, votes])
    warps = x.reshape(8, 32)
    beside = np.concatenate([warps[:, 1:], warps[:, -1:]], axis=1)
    assert np.allclose(y.reshape(8, 32), warps.sum(1, keepdims=True) + 1000 * beside, rtol=1e-4)
    positive = [sum(1 << at for at in range(32) if warp[at] > 0) for warp in warps]
    assert votes.view(np.uint32).reshape(8, 32)[:, 3].tolist() == positive


def test_half_a_warp_exchanges_alone(kernels: Kernels, x: np.ndarray) -> None:
    y = np.zeros(32, np.float32)
    kernels.launch("half_warps", (1,), (32,), [x, y])
    assert np.allclose(y, np.repeat(x[:32].reshape(2, 16).sum(1), 16), atol=1e-5)


def test_tensor_cores_multiply(kernels: Kernels) -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.normal(size=(n, 16)).astype(np.float16) for n in (16, 8))
    d = np.zeros((16, 8), np.float32)
    kernels.launch("product", (1,), (32,), [a, b, d])
    assert np.allclose(d, a.astype(np.float64) @ b.T.astype(np.float64) + 1, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "block", "words"),
    [
        ("not_all_reach", 32, "others of its warp, who wait elsewhere or have ended"),
        ("two_barriers", 64, "others of its block, who wait elsewhere or have ended"),
    ],
)
def test_a_hang_is_an_error(kernels: Kernels, name: str, block: int, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        kernels.launch(name, (1,), (block,), [])


def test_a_misaligned_load_is_an_error(kernels: Kernels) -> None:
    x, y = np.zeros(4, np.float32), np.zeros(1, np.float32)
    with pytest.raises(KernelError, match=r"is not a multiple of 4 \(block 0,0,0, thread 0,0,0\)"):
        kernels.launch("misaligned", (1,), (1,), [x, y])
    kernels.launch("misaligned", (1,), (1,), [x.ctypes.data + 2, y])


def test_memory_ends_where_it_ends(kernels: Kernels) -> None:
    memory = FencedMemory(1000)
    one = np.float32(1)
    fits, too_many = np.int32(256), np.int32(257)
    kernels.launch("offset_float", (9,), (32,), [memory.address, one, fits])
    for address in (memory.address, 0, -4 % 2**64):
        with pytest.raises(KernelError, match="nothing may be read or written at"):
            kernels.launch("offset_float", (9,), (32,), [address, one, too_many])
    memory.free()
    with pytest.raises(KernelError, match="nothing may be read or written at"):
        kernels.launch("offset_float", (9,), (32,), [memory.address, one, fits])


def test_a_division_by_zero_is_an_error(kernels: Kernels) -> None:
    x = np.array([7], np.int32)
    kernels.launch("divides", (1,), (1,), [x, np.int32(2)])
    with pytest.raises(KernelError, match="an integer is divided by 0"):
        kernels.launch("divides", (1,), (1,), [x, np.int32(0)])
    assert x[0] == 3


def test_what_a_launch_refuses(kernels: Kernels, x: np.ndarray) -> None:
    with pytest.raises(KernelError, match="no kernel offset; there are"):
        kernels.launch("offset", (1,), (1,), [])
    with pytest.raises(KernelError, match="takes arguments of kinds pfi, got pif"):
        kernels.launch("offset_float", (1,), (1,), [x, np.int32(1), np.float32(1)])
    with pytest.raises(KernelError, match="1 to 1024 threads, not 2048"):
        kernels.launch("not_all_reach", (1,), (32, 64), [])
    with pytest.raises(KernelError, match="contiguous"):
        kernels.launch("offset_float", (1,), (1,), [x[::2], np.float32(1), np.int32(1)])


def test_an_error_is_the_compilers(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="nonsense"):
        compile_kernels('extern "C" __global__ void broken() { nonsense; }', tmp_path)
