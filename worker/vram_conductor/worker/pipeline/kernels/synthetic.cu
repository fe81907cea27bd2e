// The computation of the synthetic payload (synthetic.py says what it is, and how it is checked).
//
// Each block takes every gridDim.x-th piece of 4 * blockDim.x floats, brings each pair of floats
// forward by `iterations` steps of one multiply-add per float, and adds up what comes out.

static __device__ __forceinline__ float sum_of_warp(float mine) {
    for (int bits = 16; bits > 0; bits >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, bits);
    return mine;
}

// sums: (first, second) of all pairs, one per block. Blocks of 32 to 1024 threads, whole warps.
extern "C" __global__ void synthetic(const float4* __restrict__ values, float2* sums,
                                     long long fours, int iterations, float step) {
    float first = 0, second = 0;
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < fours; i += stride) {
        float4 it = values[i];
#pragma unroll 8
        for (int n = 0; n < iterations; n++) {
            it.x = fmaf(step, it.y, it.x);
            it.z = fmaf(step, it.w, it.z);
            it.y = fmaf(-step, it.x, it.y);
            it.w = fmaf(-step, it.z, it.w);
        }
        first += it.x + it.z;
        second += it.y + it.w;
    }
    __shared__ float2 of_warps[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    first = sum_of_warp(first);
    second = sum_of_warp(second);
    if (lane == 0) of_warps[warp] = make_float2(first, second);
    __syncthreads();
    if (warp == 0) {
        bool there = lane < blockDim.x / 32;
        first = sum_of_warp(there ? of_warps[lane].x : 0.0f);
        second = sum_of_warp(there ? of_warps[lane].y : 0.0f);
        if (lane == 0) sums[blockIdx.x] = make_float2(first, second);
    }
}
