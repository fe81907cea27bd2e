// Nothing but products in registers: what this GPU's tensor cores do by mma_16816.
extern "C" __global__ void __launch_bounds__(256) mma_only(float* out, int rounds) {
    const unsigned a[4] = {threadIdx.x, threadIdx.x * 3, threadIdx.x * 5, threadIdx.x * 7};
    const unsigned b[2] = {threadIdx.x * 11, threadIdx.x * 13};
    float sums[16][4] = {};
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 16; ++i) mma_16816(sums[i], a, b, sums[i]);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
