// Activations rounded to the grid on which llama.cpp's CPU code multiplies them with a quantised
// matrix, and back to floats: what is left is the same error. x, y: [n] f32, y may be x; rows are
// whole blocks, so their number doesn't matter. The grids are those of https://github.com/ggml-org/ggml
// (ggml-quants.c): in each block y = d . round(x . 127 / max|x|), half to even, with d = max|x| / 127.

// A warp has a block of 32 . EACH values.
template <int EACH>
__device__ inline void round_block(const float* x, float* y, int n, bool half_scale) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const int first = thread / 32 * (32 * EACH) + thread % 32;
    if (first >= n) return;  // whole warps
    float value[EACH], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        value[i] = x[first + 32 * i];
        largest = fmaxf(largest, fabsf(value[i]));
    }
#pragma unroll
    for (int bits = 16; bits; bits /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, bits));
    const float steps = 127.0f / largest;
    const float d = half_scale ? half_to_float(float_to_half(largest / 127.0f)) : 1.0f / steps;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        // Without any value that d can express, `steps` is infinite, too.
        y[first + 32 * i] = d > 0.0f ? d * rintf(value[i] * steps) : 0.0f;
}

// Q8_0, and Q8_1, whose values are the same: for matrices of Q8_0, Q4_0, Q4_1, Q5_0. d is f16.
extern "C" __global__ void round_q8_0(const float* x, float* y, int n) {
    round_block<1>(x, y, n, true);
}

// Q8_K: for matrices of Q4_K, Q6_K. Blocks of 256.
extern "C" __global__ void round_q8_k(const float* x, float* y, int n) {
    round_block<8>(x, y, n, false);
}

// For matrices of F16.
extern "C" __global__ void round_f16(const float* x, float* y, int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) y[at] = half_to_float(float_to_half(x[at]));
}
