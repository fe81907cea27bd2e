// One tile's product of a warp: d = a (16 x 16) . b (16 x 8) + c (16 x 8), f16 factors, f32 sums.
//
// Whose registers hold what is that of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating
// point type": with group = lane / 4 and pair = lane % 4, each register holding two f16, the lower
// index in the lower half,
//   a[0] = A[group][2 pair ..]      a[1] = A[group + 8][2 pair ..]
//   a[2] = A[group][2 pair + 8 ..]  a[3] = A[group + 8][2 pair + 8 ..]
//   b[0] = B[2 pair ..][group]      b[1] = B[2 pair + 8 ..][group]
//   c[0], c[1] = C[group][2 pair], C[group][2 pair + 1];  c[2], c[3] = the same of row group + 8

// For GPUs without such an instruction: every lane fetches its two rows of A and two columns of B. Not
// inlined: a hundred copies of it in one kernel would take the compiler half a minute.
__device__ __noinline__ float4 mma_of_values(uint4 a, uint2 b, float4 c) {
    const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
    const unsigned left[4] = {a.x, a.y, a.z, a.w}, right[2] = {b.x, b.y};
    float sums[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int at = 0; at < 8; ++at) {  // two of the 16 products at a time
        const int of = at % 4, high = at / 4;
        unsigned rows[2], columns[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rows[i] = __shfl_sync(0xffffffffu, left[i + 2 * high], row + of);
            columns[i] = __shfl_sync(0xffffffffu, right[high], column + 4 * i + of);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = half_to_float((unsigned short)(rows[i / 2] >> 16 * half));
                const float y = half_to_float((unsigned short)(columns[i % 2] >> 16 * half));
                sums[i] = fmaf(x, y, sums[i]);
            }
        }
    }
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

__device__ inline void mma_by_shuffles(float (&d)[4], const unsigned (&a)[4],
                                       const unsigned (&b)[2], const float (&c)[4]) {
    const float4 sums = mma_of_values(make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b[0], b[1]),
                                      make_float4(c[0], c[1], c[2], c[3]));
    d[0] = sums.x;
    d[1] = sums.y;
    d[2] = sums.z;
    d[3] = sums.w;
}

#ifndef CUDA_ON_CPU
__device__ inline void mma_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                 const float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
#else
    mma_by_shuffles(d, a, b, c);
#endif
}
#endif
