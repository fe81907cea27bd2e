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
    // Of the two rows and two columns that this lane's results are made of.
    const int group = cuda_on_cpu::lane() / 4, in_group = cuda_on_cpu::lane() % 4;
    float rows[2][16], columns[2][16];
    const auto put = [](float* to, unsigned pair) {
        to[0] = half_to_float(static_cast<unsigned short>(pair));
        to[1] = half_to_float(static_cast<unsigned short>(pair >> 16));
    };
    for (int of = 0; of < 4; ++of) {
        const auto left = cuda_on_cpu::of_lane<Fragments>(group * 4 + of, line);
        for (int i = 0; i < 4; ++i) put(&rows[i % 2][i / 2 * 8 + 2 * of], left.a[i]);
        for (int column = 0; column < 2; ++column) {
            const int lane = (in_group * 2 + column) * 4 + of;
            const auto right = cuda_on_cpu::of_lane<Fragments>(lane, line);
            for (int i = 0; i < 2; ++i) put(&columns[column][i * 8 + 2 * of], right.b[i]);
        }
    }
    float sums[4];
    for (int at = 0; at < 4; ++at) {
        sums[at] = c[at];
        for (int k = 0; k < 16; ++k) sums[at] += rows[at / 2][k] * columns[at % 2][k];
    }
    memcpy(d, sums, sizeof sums);
}
