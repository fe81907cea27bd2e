// Attention of runs of tokens of one sequence (see attention.cu): tiles of 64 rows (tokens x heads of a
// KV head) by tensor cores. Needs attention_heads.cu and mma.cu.

namespace attention {
namespace tile {

constexpr int ROWS = 16 * WARPS;
constexpr int KEYS = HEAD_DIM <= 128 ? 64 : 32;  // as many as 48 KiB of shared memory take
constexpr int TOKENS = (ROWS + GROUP - 2) / GROUP + 1;
constexpr int DIM_STEPS = HEAD_DIM / 16, KEY_STEPS = KEYS / 16;

// The padding puts what a warp reads at once into 32 different banks.
struct __align__(16) Shared {
    unsigned keys[KEYS][HEAD_DIM / 2 + 4];     // two successive dimensions of a key in a word
    unsigned values[KEYS / 2][HEAD_DIM + 8];   // one dimension of two successive keys in a word
    int positions[TOKENS], sequences[TOKENS];
};

// Keys and values of the positions from `from` to `end`, zeros beyond: 0 times NaN would be NaN.
__device__ inline void load(Shared& shared, const unsigned short* keys,
                            const unsigned short* values, int kv_width, int from, int end) {
    constexpr int PARTS = HEAD_DIM / 8;
    const uint4 nothing = make_uint4(0, 0, 0, 0);
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * PARTS; i += THREADS) {
        const int key = i / PARTS, part = i % PARTS;
        const long long offset = (long long)(from + key) * kv_width + part * 8;
        *(uint4*)&shared.keys[key][part * 4] =
            from + key < end ? *(const uint4*)(keys + offset) : nothing;
    }
#pragma unroll 2
    for (int i = threadIdx.x; i < KEYS / 2 * PARTS; i += THREADS) {
        const int pair = i / PARTS, part = i % PARTS, at = from + 2 * pair;
        const unsigned short* const source = values + (long long)at * kv_width + part * 8;
        const uint4 even = at < end ? *(const uint4*)source : nothing;
        const uint4 odd = at + 1 < end ? *(const uint4*)(source + kv_width) : nothing;
        const unsigned evens[4] = {even.x, even.y, even.z, even.w};
        const unsigned odds[4] = {odd.x, odd.y, odd.z, odd.w};
        unsigned words[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words[2 * j] = (evens[j] & 0xffffu) | odds[j] << 16;
            words[2 * j + 1] = evens[j] >> 16 | (odds[j] & 0xffff0000u);
        }
        uint4* const to = (uint4*)&shared.values[pair][part * 8];
        to[0] = make_uint4(words[0], words[1], words[2], words[3]);
        to[1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
}

// Rows group and group + 8 of a warp's 16, as the registers of mma_16816 hold them.
struct Rows {
    unsigned query[DIM_STEPS][4];
    float values[2 * DIM_STEPS][4];
    float sum[2], highest[2];  // the sum is this lane's columns only, until the end

    // A tile of positions from `from`; row r sees those from seen[r] to before after[r].
    __device__ void add(const Shared& shared, int from, const int (&seen)[2],
                        const int (&after)[2]) {
        const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
        float scores[2 * KEY_STEPS][4] = {};
#pragma unroll
        for (int step = 0; step < DIM_STEPS; ++step) {
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n) {
                const unsigned* const key = shared.keys[n * 8 + group] + step * 8 + pair;
                const unsigned factors[2] = {key[0], key[4]};
                mma_16816(scores[n], query[step], factors, scores[n]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = highest[r];
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int at = from + n * 8 + 2 * pair + i;
                    float& score = scores[n][2 * r + i];
                    if (at < seen[r] || at >= after[r]) score = MASKED;
                    most = fmaxf(most, score);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
            const float factor = exp2f(highest[r] - most);
            highest[r] = most;
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < 2 * DIM_STEPS; ++n) {
                values[n][2 * r] *= factor;
                values[n][2 * r + 1] *= factor;
            }
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    scores[n][i] = exp2f(scores[n][i] - most);
                    sum[r] += scores[n][i];
                }
            }
        }
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            const float(&even)[4] = scores[2 * step], (&odd)[4] = scores[2 * step + 1];
            const unsigned weights[4] = {halves(even[0], even[1]), halves(even[2], even[3]),
                                         halves(odd[0], odd[1]), halves(odd[2], odd[3])};
#pragma unroll
            for (int n = 0; n < 2 * DIM_STEPS; ++n) {
                const unsigned factors[2] = {shared.values[step * 8 + pair][n * 8 + group],
                                             shared.values[step * 8 + pair + 4][n * 8 + group]};
                mma_16816(values[n], weights, factors, values[n]);
            }
        }
    }
};

}  // namespace tile
}  // namespace attention

// Grid (tiles of the tokens from `first` on, n_head / GROUP, splits), block 128. The tokens of a tile
// may be of several sequences: one after another then, the other rows seeing nothing meanwhile.
extern "C" __global__ void __launch_bounds__(128)
    attention_tile(const float* q, const unsigned short* k_cache, const unsigned short* v_cache,
                   float* out, float* partial, const int* position, const int* sequence, int first,
                   int tokens, int n_head, int n_ctx, float scale, int window) {
    using namespace attention;
    using namespace attention::tile;
    __shared__ Shared shared;
    const int kv_head = blockIdx.y, kv_width = n_head / GROUP * HEAD_DIM;
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    // The last tile, which sees most, begins first.
    const int first_row = (gridDim.x - 1 - blockIdx.x) * ROWS;
    const int first_token = first_row / GROUP;
    const int end_token = min(tokens, (first_row + ROWS - 1) / GROUP + 1);
    for (int i = threadIdx.x; i < end_token - first_token; i += THREADS) {
        shared.positions[i] = position[first + first_token + i];
        shared.sequences[i] = sequence[first + first_token + i];
    }

    Rows rows;
    int mine[2], head_row[2];  // of this thread's two rows: token of the launch; row of q and out
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + threadIdx.x / 32 * 16 + group + 8 * r;
        mine[r] = row / GROUP;
        head_row[r] = (first + mine[r]) * n_head + kv_head * GROUP + row % GROUP;
        rows.sum[r] = 0.0f;
        rows.highest[r] = LOWEST;
#pragma unroll
        for (int step = 0; step < DIM_STEPS; ++step) {
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                float2 x = make_float2(0.0f, 0.0f);
                if (mine[r] < tokens)
                    x = *(const float2*)(q + (long long)head_row[r] * HEAD_DIM + step * 16 +
                                         high * 8 + 2 * pair);
                rows.query[step][r + 2 * high] =
                    halves(x.x * (scale * LOG2_E), x.y * (scale * LOG2_E));
                rows.values[2 * step + high][2 * r] = 0.0f;
                rows.values[2 * step + high][2 * r + 1] = 0.0f;
            }
        }
    }
    __syncthreads();

    for (int run = first_token, next; run < end_token; run = next) {
        const int of = shared.sequences[run - first_token];
        int lowest = n_ctx, highest = 0;
        for (next = run; next < end_token && shared.sequences[next - first_token] == of; ++next) {
            const int at = shared.positions[next - first_token];
            lowest = min(lowest, first_seen(at, window));
            highest = max(highest, at);
        }
        int seen[2], after[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool there = mine[r] >= run && mine[r] < next;
            const int at = there ? shared.positions[mine[r] - first_token] : 0;
            seen[r] = first_seen(at, window);
            after[r] = there ? at + 1 : 0;
        }
        const int tiles = (highest - lowest) / KEYS + 1;
        const int share = (tiles + gridDim.z - 1) / gridDim.z * KEYS;
        const int begin = lowest + blockIdx.z * share, end = min(highest + 1, begin + share);
        const long long cells = (long long)of * n_ctx * kv_width + kv_head * HEAD_DIM;
        for (int from = begin; from < end; from += KEYS) {
            load(shared, k_cache + cells, v_cache + cells, kv_width, from, end);
            __syncthreads();
            rows.add(shared, from, seen, after);
            __syncthreads();
        }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        if (mine[r] >= tokens) continue;
        const long long part = (long long)(head_row[r] - first * n_head) * gridDim.z + blockIdx.z;
        float* const to =
            partial ? partial + part * PARTIAL : out + (long long)head_row[r] * HEAD_DIM;
        const float factor = partial ? 1.0f : 1.0f / sum;
#pragma unroll
        for (int n = 0; n < 2 * DIM_STEPS; ++n)
            *(float2*)(to + n * 8 + 2 * pair) = make_float2(rows.values[n][2 * r] * factor,
                                                            rows.values[n][2 * r + 1] * factor);
        if (partial && pair == 0)
            *(float2*)(to + HEAD_DIM) = make_float2(rows.highest[r], sum);
    }
}
