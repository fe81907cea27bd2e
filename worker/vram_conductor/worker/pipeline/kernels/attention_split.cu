// Attention of few tokens (see attention.cu): each block takes one token, one KV head and one split of
// the positions. Needs attention_heads.cu.

namespace attention {
namespace split {

// A block takes as many heads as fit its registers; the grid has CHUNKS blocks per KV head.
constexpr int CHUNKS = (GROUP + 3) / 4, HEADS = (GROUP + CHUNKS - 1) / CHUNKS;
// A lane loads 8 values (16 bytes) at once: LANES lanes take one key, a warp several.
__device__ constexpr int lanes(int wanted) { return wanted <= 2 ? 2 : 2 * lanes((wanted + 1) / 2); }
constexpr int LANES = lanes(HEAD_DIM / 8), KEYS = 32 / LANES;
constexpr int STEPS = 4;  // keys per lane between two looks at the maximum

__device__ inline void unpack(const uint4& packed, float (&values)[8]) {
    const unsigned pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = low_half(pairs[i]);
        values[2 * i + 1] = high_half(pairs[i]);
    }
}

// What some of the positions contribute to one head: a lane's 8 values.
struct Sum {
    float values[8], sum, highest;

    __device__ void rescale(float to) {
        const float factor = exp2f(highest - to);
        highest = to;
        sum *= factor;
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= factor;
    }
    // With the lane whose number differs in these bits.
    __device__ void merge(int bits) {
        rescale(fmaxf(highest, __shfl_xor_sync(ALL, highest, bits)));
        sum += __shfl_xor_sync(ALL, sum, bits);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] += __shfl_xor_sync(ALL, values[i], bits);
    }
};

}  // namespace split
}  // namespace attention

// Grid (tokens, n_head / GROUP * CHUNKS, splits), block 128. `partial` is null without splits.
extern "C" __global__ void __launch_bounds__(128)
    attention_split(const float* q, const unsigned short* k_cache, const unsigned short* v_cache,
                    float* out, float* partial, const int* position, const int* sequence,
                    int first, int tokens, int n_head, int n_ctx, float scale, int window) {
    using namespace attention;
    using namespace attention::split;
    __shared__ float values[WARPS][HEADS][HEAD_DIM];
    __shared__ float sums[WARPS][HEADS], maxima[WARPS][HEADS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int token = first + blockIdx.x, kv_head = blockIdx.y / CHUNKS;
    const int head_in_group = blockIdx.y % CHUNKS * HEADS;
    const long long row = (long long)token * n_head + kv_head * GROUP + head_in_group;
    const int heads = min(HEADS, GROUP - head_in_group);
    const int dim = lane % LANES * 8;
    const bool has_values = dim < HEAD_DIM;

    float query[HEADS][8];
    Sum total[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool there = h < heads && has_values;
            query[h][i] = there ? q[(row + h) * HEAD_DIM + dim + i] * (scale * LOG2_E) : 0.0f;
            total[h].values[i] = 0.0f;
        }
        total[h].sum = 0.0f;
        total[h].highest = LOWEST;
    }

    const int seen = first_seen(position[token], window), after = position[token] + 1;
    const int share = (after - seen + gridDim.z - 1) / gridDim.z;
    const int begin = seen + blockIdx.z * share, end = min(after, begin + share);
    const int kv_width = n_head / GROUP * HEAD_DIM;
    const long long cells = (long long)sequence[token] * n_ctx * kv_width + kv_head * HEAD_DIM;
    const unsigned short *const keys = k_cache + cells + dim, *const stored = v_cache + cells + dim;
    for (int from = begin + warp * KEYS * STEPS; from < end; from += WARPS * KEYS * STEPS) {
        uint4 key[STEPS], value[STEPS];
        float scores[HEADS][STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int at = from + step * KEYS + lane / LANES;
            const bool there = at < end && has_values;
            const long long offset = (long long)at * kv_width;
            key[step] = there ? *(const uint4*)(keys + offset) : make_uint4(0, 0, 0, 0);
            value[step] = there ? *(const uint4*)(stored + offset) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const bool there = from + step * KEYS + lane / LANES < end;
            float factors[8];
            unpack(key[step], factors);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) score = fmaf(query[h][i], factors[i], score);
#pragma unroll
                for (int bits = 1; bits < LANES; bits *= 2)
                    score += __shfl_xor_sync(ALL, score, bits);
                scores[h][step] = there ? score : MASKED;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float highest = total[h].highest;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) highest = fmaxf(highest, scores[h][step]);
            total[h].rescale(highest);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            float factors[8];
            unpack(value[step], factors);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                const float weight = exp2f(scores[h][step] - total[h].highest);
                total[h].sum += weight;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    total[h].values[i] = fmaf(weight, factors[i], total[h].values[i]);
            }
        }
    }

#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int bits = LANES; bits < 32; bits *= 2) total[h].merge(bits);
        if (lane < LANES && has_values) {
#pragma unroll
            for (int i = 0; i < 8; ++i) values[warp][h][dim + i] = total[h].values[i];
        }
        if (lane == 0) {
            sums[warp][h] = total[h].sum;
            maxima[warp][h] = total[h].highest;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * HEAD_DIM; i += THREADS) {
        const int h = i / HEAD_DIM, at = i % HEAD_DIM;
        float highest = LOWEST, sum = 0.0f, mixed = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, maxima[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2f(maxima[w][h] - highest);
            sum = fmaf(weight, sums[w][h], sum);
            mixed = fmaf(weight, values[w][h][at], mixed);
        }
        if (!partial) {
            out[(row + h) * HEAD_DIM + at] = mixed / sum;
            continue;
        }
        const long long part = (row + h - (long long)first * n_head) * gridDim.z + blockIdx.z;
        partial[part * PARTIAL + at] = mixed;
        if (at == 0) {
            partial[part * PARTIAL + HEAD_DIM] = highest;
            partial[part * PARTIAL + HEAD_DIM + 1] = sum;
        }
    }
}
