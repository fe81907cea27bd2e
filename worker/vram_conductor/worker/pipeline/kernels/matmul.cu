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

// Two products of tiles: octets of 8 columns, of 16 rows (a lane has two) and of 8 tokens.
__device__ inline void add_products(const Pair (&upper)[4], const Pair (&lower)[4], const uint4& x,
                                    float (&sums)[4]) {
    const unsigned first[4] = {upper[0], lower[0], upper[1], lower[1]}, x_first[2] = {x.x, x.y};
    const unsigned second[4] = {upper[2], lower[2], upper[3], lower[3]}, x_second[2] = {x.z, x.w};
    mma_16816(sums, first, x_first, sums);
    mma_16816(sums, second, x_second, sums);
}

// Weights go from their packed form straight into the registers that the tensor cores read;
// activations go through shared memory. Both are loaded one step ahead. A warp computes WARP_ROWS x
// WARP_TOKENS of the tile. Warps that are left over share the columns, and their sums are added at
// the end.
template <class Type, int TOKENS, int ROWS, int WARP_TOKENS, int WARP_ROWS>
struct Tile {
    typedef Part<Type> Weights;
    static const int ROW_WARPS = ROWS / WARP_ROWS, TOKEN_WARPS = TOKENS / WARP_TOKENS;
    static const int SHARES = WARPS / (ROW_WARPS * TOKEN_WARPS);  // of the columns
    static const int STAGE = SHARES * TOKENS * STEP / 8;          // octets of activations

    // Where an octet is kept among its token's 16 of a step, and which is kept there. Lanes that
    // read at the same time (the four parts' i-th octets, of two tokens) meet 8 different groups of
    // banks, and so do those that copy 8 successive octets.
    static __device__ int place(int token, int octet) { return octet ^ octet / 8 ^ token % 2 * 6; }

    // The activations of SHARES steps, the `round`-th such; zeros where there are none. A thread
    // copies the same octet of every 16th token (they are even in number).
    static __device__ void fetch(const Problem& problem, int first_token, int round, uint4* stage) {
        const int begin = threadIdx.x / 16, kept = threadIdx.x % 16;
        const int column = SHARES * round * STEP + 8 * place(begin, kept);
#pragma unroll
        for (int k = 0; k < SHARES * TOKENS / 16; ++k) {
            const unsigned at = begin + 16 * k, share = at / TOKENS;
            const int token = first_token + at % TOKENS, from = column + share * STEP;
            const bool wanted = token < problem.tokens && from < problem.columns;
            const long long source = wanted ? (long long)token * problem.columns + from : 0;
            copy_ahead(stage + 16 * at + kept, problem.x + source, wanted);
        }
    }

    static __device__ void compute(const Problem& problem, int first_row, int first_token) {
        extern __shared__ uint4 shared[];  // two stages
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int group = lane / 4, part = lane % 4;
        const int row = warp % ROW_WARPS * WARP_ROWS + group;
        const int token = warp / ROW_WARPS % TOKEN_WARPS * WARP_TOKENS;
        const int share = warp / (ROW_WARPS * TOKEN_WARPS);

        const int rounds = (problem.columns + SHARES * STEP - 1) / (SHARES * STEP);
        // Blocks that read the same activations begin at different ones: the L2 cache serves one
        // line to one reader after another.
        int at = first_row / ROWS % rounds;

        float sums[WARP_ROWS / 16][WARP_TOKENS / 8][4] = {};
        const u8* rows[WARP_ROWS / 8];
        Weights next[WARP_ROWS / 8], now[WARP_ROWS / 8];
#pragma unroll
        for (int m = 0; m < WARP_ROWS / 8; ++m) {
            rows[m] = problem.row<Type>(first_row + row + 8 * m);
            next[m].load(rows[m], problem.columns, SHARES * at + share, part);
        }
        fetch(problem, first_token, at, shared);
        for (int round = 0; round < rounds; ++round) {
            wait_for_copies();
            __syncthreads();  // the copies of all are there, and all are done with the other stage
#pragma unroll
            for (int m = 0; m < WARP_ROWS / 8; ++m) now[m] = next[m];
            if (round + 1 < rounds) {
                at = at + 1 < rounds ? at + 1 : 0;
                fetch(problem, first_token, at, shared + (round + 1) % 2 * STAGE);
#pragma unroll
                for (int m = 0; m < WARP_ROWS / 8; ++m)
                    next[m].load(rows[m], problem.columns, SHARES * at + share, part);
            }
            const uint4* const stage = shared + round % 2 * STAGE + (share * TOKENS + token) * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Pair w[WARP_ROWS / 8][4];
#pragma unroll
                for (int m = 0; m < WARP_ROWS / 8; ++m) now[m].values(part, i, w[m]);
                const int octet = place(group, Weights::octet(part, i));
#pragma unroll
                for (int n = 0; n < WARP_TOKENS / 8; ++n) {
                    const uint4 x = stage[(8 * n + group) * 16 + octet];
#pragma unroll
                    for (int m = 0; m < WARP_ROWS / 16; ++m)
                        add_products(w[2 * m], w[2 * m + 1], x, sums[m][n]);
                }
            }
        }

        __syncthreads();  // all are done with the last stage
        float* const kept = (float*)shared;  // [share][token][row], as much as two stages at most
#pragma unroll
        for (int m = 0; m < WARP_ROWS / 16; ++m) {
#pragma unroll
            for (int n = 0; n < WARP_TOKENS / 8; ++n) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int of = share * TOKENS + token + 8 * n + 2 * part + k % 2;
                    kept[of * ROWS + row + 16 * m + k / 2 * 8] = sums[m][n][k];
                }
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
template <class Type, int TOKENS, int ROWS, int, int>
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

// What a warp of the largest tile computes: such that it keeps nothing in memory.
template <class Type>
struct Wide {
    static const int TOKENS = 128, ROWS = 16;
};
template <>
struct Wide<F32> {
    static const int TOKENS = 64, ROWS = 32;
};

}  // namespace matmul

#define MATMUL(NAME, TYPE, TOKENS, ROWS, WARP_TOKENS, WARP_ROWS)                             \
    extern "C" __global__ void __launch_bounds__(256, TOKENS < 64 ? 2 : 1)                   \
        matmul_##NAME##_##TOKENS(const u8* w, const half* x, const float* scale, float* y,   \
                                 const float* bias, const float* add, int rows, int columns, \
                                 int tokens) {                                               \
        const matmul::Problem it = {w, x, scale, y, bias, add, rows, columns, tokens};       \
        typedef matmul::Tile<TYPE, TOKENS, ROWS, WARP_TOKENS, WARP_ROWS> Tile;               \
        Tile::compute(it, blockIdx.y * ROWS, blockIdx.x * TOKENS);                           \
    }
#define MATMULS(NAME, TYPE)            \
    MATMUL(NAME, TYPE, 8, 16, 8, 16)   \
    MATMUL(NAME, TYPE, 16, 32, 16, 16) \
    MATMUL(NAME, TYPE, 32, 32, 32, 16) \
    MATMUL(NAME, TYPE, 64, 64, 64, 16) \
    MATMUL(NAME, TYPE, 128, 128, matmul::Wide<TYPE>::TOKENS, matmul::Wide<TYPE>::ROWS)
TYPES(MATMULS)  // those that kernel_source.py chose
#undef MATMULS
#undef MATMUL
