// x / scale as f16, scale the power of two with the token's largest |x / scale| in [2^14, 2^15):
// exact but for f16's own rounding, without overflow, and with all its range for the small ones.
// (CuPy compiles with -ftz=true: an x below 2^-126 counts as 0.)
// x: [tokens][columns], aligned to 16, columns a multiple of 4. A block of whole warps per token.
extern "C" __global__ void to_half(const float* x, half* out, float* scale, int tokens,
                                   int columns) {
    __shared__ float maxima[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const float4* const from = (const float4*)(x + (long long)blockIdx.x * columns);
    uint2* const to = (uint2*)(out + (long long)blockIdx.x * columns);

    float largest = 0.0f;
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = from[i];
        const float first = fmaxf(fabsf(v.x), fabsf(v.y)), second = fmaxf(fabsf(v.z), fabsf(v.w));
        largest = fmaxf(largest, fmaxf(first, second));
    }
#pragma unroll
    for (int bits = 16; bits; bits /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, bits));
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
    for (int i = 0; i < warps; ++i) largest = fmaxf(largest, maxima[i]);

    // By their exponent bits; not below 2^-126, the smallest normal number.
    const int exponent = max((int)(__float_as_uint(largest) >> 23) - 14, 1);
    const float inverse = __uint_as_float((unsigned)(254 - exponent) << 23);
    if (threadIdx.x == 0) scale[blockIdx.x] = __uint_as_float((unsigned)exponent << 23);
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        const float4 v = from[i];
        to[i] = make_uint2(
            float_to_half(v.x * inverse) | (unsigned)float_to_half(v.y * inverse) << 16,
            float_to_half(v.z * inverse) | (unsigned)float_to_half(v.w * inverse) << 16);
    }
}
