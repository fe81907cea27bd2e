// Several tokens at once, with the weights as they are stored:
//   y[token][row] = scale[token] . sum over columns of w[row][column] . x[token][column]
//                   (+ bias[row])  (+ add[token][row])
//
// w: [rows] rows of a GGUF tensor, aligned to 16; x: [tokens][columns] and scale: [tokens], from
// to_half, x aligned to 16; bias: [rows] or null; add: [tokens][rows] or null, may be y. columns: a
// multiple of 32 and of the type's block. Needs formats.cu, mma.cu, pairs.cu, matmul_weights.cu.
//
// A block of 8 warps computes a tile of rows x tokens; its kernel's name ends with the tokens. The
// order of the additions is fixed: equal inputs give equal outputs.

namespace matmul {

const int WARPS = 8;
const int THREADS = 32 * WARPS;

struct Problem {
    const u8* w;
    const half* x;
    const float* scale;
    float* y;
    const float* bias;
    const float* add;
    int rows, columns, tokens;

    // Behind the last row, and the last token, the last one is computed again and not stored.
    template <class Type>
    __device__ const u8* row(int at) const {
        return w + min(at, rows - 1) * row_bytes<Type>(columns);
    }
    __device__ const half* token(int at) const {
        return x + (long long)min(at, tokens - 1) * columns;
    }
    __device__ void store(int token, int row, float sum) const {
        if (token >= tokens || row >= rows) return;
        const long long at = (long long)token * rows + row;
        y[at] = fmaf(sum, scale[token], (bias ? bias[row] : 0.0f) + (add ? add[at] : 0.0f));
    }
};

#ifdef TENSOR_CORES

// 16 bytes into shared memory, zeros unless `wanted`; there after wait_for_copies.
__device__ inline void copy_ahead(uint4* to, const void* from, bool wanted) {
#ifdef CUDA_ON_CPU
    *to = wanted ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#else
    asm volatile(
        "{ .reg .u64 at; .reg .u32 shared;\n"
        "  cvta.to.shared.u64 at, %0; cvt.u32.u64 shared, at;\n"
        "  cp.async.cg.shared.global [shared], [%1], 16, %2; }" ::"l"(to),
        "l"(from), "r"(wanted ? 16 : 0)
        : "memory");
#endif
}
__device__ inline void wait_for_copies() {
#ifndef CUDA_ON_CPU
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Weights go from their packed form straight into the registers that the tensor cores read, each
// unpacked by one warp only; activations go through shared memory. Both are loaded one step ahead.
// A warp has 16 rows and all tokens of the tile. Where the tile has fewer rows than 8 warps do,
// they share the columns, and their sums are added at the end.
template <class Type, int TOKENS, int ROWS>
struct Tile {
    typedef Part<Type> Weights;
    static const int ROW_WARPS = ROWS / 16;
    static const int SHARES = WARPS / ROW_WARPS;           // of the columns
    static const int STAGE = SHARES * TOKENS * STEP / 8;  // octets of activations

    // Where the i-th octet of lane `part` is kept among its token's 16 of a step: the 8 lanes that
    // read at the same time, the four parts of two tokens, then meet 8 different groups of banks.
    static __device__ int place(int token, int part, int i) {
        return (4 * i + part) ^ token % 2 * 4;
    }

    // The activations of SHARES steps, of the `round`-th such; zeros beyond the columns. A thread
    // copies the same octet of every 16th token (they are even in number).
    static __device__ void fetch(const Problem& problem, int first_token, int round, uint4* stage) {
        const unsigned begin = threadIdx.x / 16, kept = threadIdx.x % 16;
        const unsigned read = kept ^ begin % 2 * 4;  // place's inverse
        const int column = SHARES * round * STEP + 8 * Weights::octet(read % 4, read / 4);
#pragma unroll
        for (unsigned k = 0; k < SHARES * TOKENS / 16; ++k) {
            const unsigned at = begin + 16 * k, share = at / TOKENS, token = at % TOKENS;
            const int from = column + share * STEP;
            const bool wanted = from < problem.columns;
            const half* const row = problem.token(first_token + token);
            copy_ahead(stage + 16 * at + kept, row + (wanted ? from : 0), wanted);
        }
    }

    static __device__ void compute(const Problem& problem, int first_row, int first_token) {
        extern __shared__ uint4 shared[];  // two stages
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int group = lane / 4, part = lane % 4;
        const int row = warp % ROW_WARPS * 16 + group, share = warp / ROW_WARPS;
        const u8* const upper = problem.row<Type>(first_row + row);
        const u8* const lower = problem.row<Type>(first_row + row + 8);

        float sums[TOKENS / 8][4] = {};
        Weights next[2];
        next[0].load(upper, problem.columns, share, part);
        next[1].load(lower, problem.columns, share, part);
        fetch(problem, first_token, 0, shared);
        const int rounds = (problem.columns + SHARES * STEP - 1) / (SHARES * STEP);
        for (int round = 0; round < rounds; ++round) {
            wait_for_copies();
            __syncthreads();  // the copies of all are there, and all are done with the other stage
            const Weights now[2] = {next[0], next[1]};
            if (round + 1 < rounds) {
                const int step = SHARES * (round + 1) + share;
                fetch(problem, first_token, round + 1, shared + (round + 1) % 2 * STAGE);
                next[0].load(upper, problem.columns, step, part);
                next[1].load(lower, problem.columns, step, part);
            }
            const uint4* const stage = shared + round % 2 * STAGE + share * TOKENS * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Pair above[4], below[4];
                now[0].values(part, i, above);
                now[1].values(part, i, below);
                const unsigned first[4] = {above[0], below[0], above[1], below[1]};
                const unsigned second[4] = {above[2], below[2], above[3], below[3]};
#pragma unroll
                for (int n = 0; n < TOKENS / 8; ++n) {
                    const uint4 x = stage[(8 * n + group) * 16 + place(group, part, i)];
                    const unsigned x_first[2] = {x.x, x.y}, x_second[2] = {x.z, x.w};
                    mma_16816(sums[n], first, x_first, sums[n]);
                    mma_16816(sums[n], second, x_second, sums[n]);
                }
            }
        }

        __syncthreads();  // all are done with the last stage
        float* const kept = (float*)shared;  // [share][token][row], as much as two stages at most
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int token = 8 * n + 2 * part + k % 2;
                kept[(share * TOKENS + token) * ROWS + row + k / 2 * 8] = sums[n][k];
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < TOKENS * ROWS; at += THREADS) {
            float sum = kept[at];
#pragma unroll
            for (int of = 1; of < SHARES; ++of) sum += kept[of * TOKENS * ROWS + at];
            problem.store(first_token + at / ROWS, first_row + at % ROWS, sum);
        }
    }
};

#else

// Plain f32: two pieces (see formats.cu) of all the tile's rows and tokens at a time in shared
// memory, from which every thread computes some rows for some tokens.
template <class Type, int TOKENS, int ROWS>
struct Tile {
    static const int DEPTH = 2 * PIECE_VALUES;
    static const int ACROSS = TOKENS < 16 ? TOKENS : 16;  // threads along the tokens
    static const int ALONG = THREADS / ACROSS;            // and along the rows
    static const int MY_TOKENS = TOKENS / ACROSS;
    static const int MY_ROWS = (ROWS + ALONG - 1) / ALONG;

    static __device__ void compute(const Problem& problem, int first_row, int first_token) {
        __shared__ float weights[ROWS][DEPTH + 1], values[TOKENS][DEPTH + 1];
        const int along = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
        float sums[MY_ROWS][MY_TOKENS] = {};
        for (int first = 0; first < problem.columns / PIECE_VALUES; first += 2) {
            __syncthreads();  // all are done with the ones before
            for (int at = threadIdx.x; at < 2 * ROWS; at += THREADS) {
                const u8* const row = problem.row<Type>(first_row + at / 2);
                const int piece = first + at % 2;
                float low[8], high[8];
                Type::piece(block_of<Type>(row, piece), piece_in_block<Type>(piece), low, high);
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    weights[at / 2][at % 2 * PIECE_VALUES + k] = low[k];
                    weights[at / 2][at % 2 * PIECE_VALUES + 8 + k] = high[k];
                }
            }
            for (int at = threadIdx.x; at < DEPTH * TOKENS; at += THREADS) {
                const int k = at % DEPTH, token = at / DEPTH;
                const int piece = first + k / PIECE_VALUES, run = k / 8 % 2;
                const int column = column_of<Type>(piece) + run * Type::APART + k % 8;
                values[token][k] = half_to_float(problem.token(first_token + token)[column]);
            }
            __syncthreads();
#pragma unroll 4
            for (int k = 0; k < DEPTH; ++k) {
                float of_row[MY_ROWS], of_token[MY_TOKENS];
#pragma unroll
                for (int m = 0; m < MY_ROWS; ++m)
                    of_row[m] = weights[(along + m * ALONG) % ROWS][k];
#pragma unroll
                for (int n = 0; n < MY_TOKENS; ++n)
                    of_token[n] = values[across + n * ACROSS][k];
#pragma unroll
                for (int m = 0; m < MY_ROWS; ++m) {
#pragma unroll
                    for (int n = 0; n < MY_TOKENS; ++n)
                        sums[m][n] = fmaf(of_row[m], of_token[n], sums[m][n]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MY_ROWS; ++m) {
            const int row = along + m * ALONG;
            if (row >= ROWS) break;
#pragma unroll
            for (int n = 0; n < MY_TOKENS; ++n)
                problem.store(first_token + across + n * ACROSS, first_row + row, sums[m][n]);
        }
    }
};

#endif

}  // namespace matmul

// x / scale as f16, scale the power of two with the token's largest |x / scale| in [2^14, 2^15):
// exact but for f16's own rounding, without overflow, and with all its range for the small ones.
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

#define MATMUL(NAME, TYPE, TOKENS, ROWS)                                                          \
    extern "C" __global__ void __launch_bounds__(256, TOKENS < 64 ? 2 : 1) NAME##_##TOKENS(       \
        const u8* w, const half* x, const float* scale, float* y, const float* bias,              \
        const float* add, int rows, int columns, int tokens) {                                    \
        const matmul::Problem it = {w, x, scale, y, bias, add, rows, columns, tokens};            \
        matmul::Tile<TYPE, TOKENS, ROWS>::compute(it, blockIdx.y * ROWS, blockIdx.x * TOKENS);    \
    }
#define MATMULS(NAME, TYPE)   \
    MATMUL(NAME, TYPE, 8, 16) \
    MATMUL(NAME, TYPE, 16, 32) \
    MATMUL(NAME, TYPE, 32, 32) \
    MATMUL(NAME, TYPE, 64, 64) \
    MATMUL(NAME, TYPE, 128, 128)
MATMULS(matmul_f32, F32)
MATMULS(matmul_f16, F16)
MATMULS(matmul_q8_0, Q8_0)
MATMULS(matmul_q4_0, Q4_0)
MATMULS(matmul_q4_1, Q4_1)
MATMULS(matmul_q5_0, Q5_0)
MATMULS(matmul_q4_k, Q4_K)
MATMULS(matmul_q6_k, Q6_K)
#undef MATMULS
#undef MATMUL
