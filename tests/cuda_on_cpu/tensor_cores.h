// Tensor cores for the CPU: what the warp-wide PTX instructions compute.
#pragma once

#include "cuda.h"

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: d = a (16 x 16, by rows) . b (16 x 8, by
// columns) + c (16 x 8); the fragments' layout is that of the PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type".
inline void mma_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                      const float (&c)[4], int line = __builtin_LINE()) {
    struct Fragments { unsigned a[4], b[2]; };
    Fragments mine;
    memcpy(mine.a, a, sizeof a);
    memcpy(mine.b, b, sizeof b);
    cuda_on_cpu::exchange(~0u, mine, line);
    const auto half_of = [](unsigned pair, int high) {
        return half_to_float(static_cast<unsigned short>(high ? pair >> 16 : pair));
    };
    const int group = cuda_on_cpu::lane() / 4, in_group = cuda_on_cpu::lane() % 4;
    float sums[4];
    for (int at = 0; at < 4; ++at) {
        const int row = group + at / 2 * 8, column = in_group * 2 + at % 2;
        float sum = c[at];
        for (int k = 0; k < 16; ++k) {
            const int of = k % 8 / 2;
            const auto left = cuda_on_cpu::of_lane<Fragments>(row % 8 * 4 + of, line);
            const auto right = cuda_on_cpu::of_lane<Fragments>(column * 4 + of, line);
            sum += half_of(left.a[row / 8 + k / 8 * 2], k % 2) * half_of(right.b[k / 8], k % 2);
        }
        sums[at] = sum;
    }
    memcpy(d, sums, sizeof sums);
}
