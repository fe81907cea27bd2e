// What the kernels of attention.cu have in common: the shape of a model's heads, what a token sees, and
// f16 pairs. Needs formats.cu.
#ifndef ATTENTION_HEAD_DIM
#define ATTENTION_HEAD_DIM 128  // a multiple of 16, up to 256
#define ATTENTION_GROUP 4       // heads that share a KV head
#endif

namespace attention {

constexpr int HEAD_DIM = ATTENTION_HEAD_DIM, GROUP = ATTENTION_GROUP;
constexpr int PARTIAL = HEAD_DIM + 2;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr unsigned ALL = 0xffffffffu;
constexpr float LOG2_E = 1.44269504f;
// The score of a position that isn't seen, and the maximum of none: exp2(MASKED - LOWEST) is 0.
constexpr float MASKED = -3e38f, LOWEST = -1e38f;

__device__ inline int first_seen(int position, int window) {
    return window ? max(0, position - window + 1) : 0;
}

__device__ inline float low_half(unsigned pair) { return half_to_float((unsigned short)pair); }
__device__ inline float high_half(unsigned pair) {
    return half_to_float((unsigned short)(pair >> 16));
}
__device__ inline unsigned halves(float low, float high) {
    return float_to_half(low) | (unsigned)float_to_half(high) << 16;
}

}  // namespace attention
