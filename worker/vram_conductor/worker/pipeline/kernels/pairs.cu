// Weights as tensor cores read them: f16, two in a register, the first in the lower half.
//
// How exact they are: q - offset is, and is rounded once when it is multiplied by a block's f16
// factor. A K-quant's factor d . scale is itself rounded, by 2^-11 of it at most. Nothing is lost
// to small numbers beyond that: an f16 is a multiple of 2^-24, so are its products with integers,
// and f16 holds all of those below 2^-13 exactly.

// Compute capability 8.0 and later. MATMUL_PLAIN: for the test of what older ones run.
#if !defined(MATMUL_PLAIN) && (defined(CUDA_ON_CPU) || __CUDA_ARCH__ >= 800)
#define TENSOR_CORES

namespace matmul {

typedef unsigned Pair;

#ifndef CUDA_ON_CPU

// Four of the eight bytes of `low` and `high`: nibble i of `selector` says which is byte i.
__device__ inline unsigned permute(unsigned low, unsigned high, unsigned selector) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}
// a . b + c, rounded once.
__device__ inline Pair fused(Pair a, Pair b, Pair c) {
    Pair result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
__device__ inline Pair pair_of(float first, float second) {
    Pair result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}

#else

inline unsigned permute(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i)
        result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline Pair pair_of(float first, float second) {
    return float_to_half(first) | (Pair)float_to_half(second) << 16;
}
// In double the product is exact, and the sum is rounded at 53 bits, far below f16's 11.
inline half fused_half(half a, half b, half c) {
    return float_to_half((float)((double)half_to_float(a) * half_to_float(b) + half_to_float(c)));
}
inline Pair fused(Pair a, Pair b, Pair c) {
    return fused_half((half)a, (half)b, (half)c) |
           (Pair)fused_half((half)(a >> 16), (half)(b >> 16), (half)(c >> 16)) << 16;
}

#endif

const Pair NOTHING = 0x80008000u;  // -0 twice: what is added to leave even a -0 as it is

// The same value twice: an f16's bits, the lower half of `bits`, or a float, rounded.
__device__ inline Pair both_of_half(unsigned bits) { return permute(bits, 0, 0x1010); }
__device__ inline Pair both(float x) { return pair_of(x, x); }

// Bytes `first` and `first` + 1 (0 or 2) of a word, less `offset`: 0x6400 | q is the f16 1024 + q.
__device__ inline Pair bytes_less(unsigned word, int first, int offset) {
    const Pair above = permute(word, 0x64646464u, first ? 0x4342 : 0x4140);
    return fused(above, 0x3C003C00u, (0xE400u + offset) * 0x10001u);  // . 1 - (1024 + offset)
}

}  // namespace matmul

#endif
