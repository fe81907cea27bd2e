// Products of one warp's tile each, for tests of mma.cu: a [16][16], b [16][8] f16; c, d [16][8] f32.
__device__ inline unsigned two(const unsigned short* low, const unsigned short* high) {
    return *low | (unsigned)*high << 16;
}

#define PRODUCT(NAME)                                                                             \
    extern "C" __global__ void product_##NAME(const unsigned short* a, const unsigned short* b,   \
                                              const float* c, float* d) {                         \
        const int group = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;                            \
        a += blockIdx.x * 256, b += blockIdx.x * 128, c += blockIdx.x * 128;                      \
        d += blockIdx.x * 128;                                                                    \
        unsigned left[4], right[2];                                                               \
        float sums[4];                                                                            \
        for (int i = 0; i < 4; ++i) {                                                             \
            const unsigned short* at = a + (group + i % 2 * 8) * 16 + pair + i / 2 * 8;           \
            left[i] = two(at, at + 1);                                                            \
            sums[i] = c[(group + i / 2 * 8) * 8 + pair + i % 2];                                  \
        }                                                                                         \
        for (int i = 0; i < 2; ++i) {                                                             \
            const unsigned short* at = b + (pair + i * 8) * 8 + group;                            \
            right[i] = two(at, at + 8);                                                           \
        }                                                                                         \
        NAME(sums, left, right, sums);                                                            \
        for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = sums[i];          \
    }
PRODUCT(mma_16816)
PRODUCT(mma_by_shuffles)
