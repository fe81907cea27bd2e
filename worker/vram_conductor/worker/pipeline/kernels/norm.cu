// Root mean square normalisation, https://arxiv.org/abs/1910.07467:
//   y = x / sqrt(mean(x²) + eps) . w, and add + that where `add` isn't null.
//
// x, add, y: [rows][width]; w: [width]. One block of whole warps per row, at most 1024 threads. y may
// be x or add: every thread writes what it alone has read.

__device__ inline float sum_of_warp(float x) {
#pragma unroll
    for (int bits = 16; bits; bits /= 2) x += __shfl_xor_sync(0xffffffffu, x, bits);
    return x;
}

// Every thread gets the sum over the block: a tree, so that its error stays at a few ulp.
__device__ inline float sum_of_block(float x) {
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = sum_of_warp(x);
    if (warps == 1) return x;
    if (lane == 0) sums[warp] = x;
    __syncthreads();
    return sum_of_warp(lane < warps ? sums[lane] : 0.0f);
}

extern "C" __global__ void rms_norm(const float* x, const float* w, const float* add, float* y,
                                    int rows, int width, float eps) {
    const long long first = (long long)blockIdx.x * width;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float value = x[first + i];
        squares = fmaf(value, value, squares);
    }
    const float factor = 1.0f / sqrtf(sum_of_block(squares) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float normed = x[first + i] * factor * w[i];
        y[first + i] = add ? add[first + i] + normed : normed;
    }
}
