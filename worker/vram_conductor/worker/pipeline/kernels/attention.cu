// Grouped-query attention (https://arxiv.org/abs/2305.13245) over a cache of f16 keys and values,
// with the softmax taken on the way (https://arxiv.org/abs/2205.14135): a running maximum and sum per
// row, no matrix of scores. Scores are in units of log2(e), so that exp2 does.
//
// q, out: [token][head][HEAD_DIM] f32. Caches: [sequence][n_ctx][KV head][HEAD_DIM]. Head h uses KV
// head h / GROUP. Token t sees the positions of sequence[t] up to position[t]; with a window, only
// the last `window` of them, its own included. What lies in the cache beyond them is never used,
// NaN or not.
//
// attention_split.cu is for few tokens, attention_tile.cu for prompts. Both may split the positions
// over gridDim.z blocks. Each then leaves in `partial` [token - first][head][split] its weighted
// values, its maximum and its sum, and attention_combine makes one of them.

// k, v: [tokens][kv_width] into the cells of their tokens. One thread per value.
extern "C" __global__ void store_kv(const float* k, const float* v, unsigned short* k_cache,
                                    unsigned short* v_cache, const int* position,
                                    const int* sequence, int tokens, int n_ctx, int kv_width) {
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)tokens * kv_width) return;
    const int token = at / kv_width;
    const long long cell = (long long)sequence[token] * n_ctx + position[token];
    const long long to = cell * kv_width + at % kv_width;
    k_cache[to] = float_to_half(k[at]);
    v_cache[to] = float_to_half(v[at]);
}

// Grid (tokens . n_head), block of at most HEAD_DIM threads: what `splits` blocks left, as one.
extern "C" __global__ void attention_combine(const float* partial, float* out, int first,
                                             int n_head, int splits) {
    using namespace attention;
    const float* const parts = partial + (long long)blockIdx.x * splits * PARTIAL;
    const long long row = (long long)first * n_head + blockIdx.x;
    float highest = LOWEST;
    for (int i = 0; i < splits; ++i) highest = fmaxf(highest, parts[i * PARTIAL + HEAD_DIM]);
    for (int at = threadIdx.x; at < HEAD_DIM; at += blockDim.x) {
        float sum = 0.0f, mixed = 0.0f;
        for (int i = 0; i < splits; ++i) {
            const float* const part = parts + i * PARTIAL;
            const float weight = exp2f(part[HEAD_DIM] - highest);
            sum = fmaf(weight, part[HEAD_DIM + 1], sum);
            mixed = fmaf(weight, part[at], mixed);
        }
        out[row * HEAD_DIM + at] = mixed / sum;
    }
}
