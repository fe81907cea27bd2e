// One token's matrix-vector product with the weights as they are stored:
//   y[row] = sum over columns of w[row][column] . x[column]  (+ bias[row])  (+ add[row])
//
// w: [rows] rows of a GGUF tensor, aligned to 16; x: [columns], aligned to 16; bias and add (a
// residual): [rows] or null; y: [rows], may be add. Needs formats.cu.
//
// A warp computes MATVEC_ROWS rows, so that x is read once for them; each lane takes pieces (see
// formats.cu) 32 apart. The order of the additions is fixed: equal inputs give equal outputs.

const int MATVEC_ROWS = 2;  // launch_geometry.py has the same

template <class Type>
__device__ inline void matvec(const u8* w, const float* x, float* y, const float* bias,
                              const float* add, int rows, int columns) {
    const int lane = threadIdx.x % 32;
    const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * MATVEC_ROWS;
    if (first >= rows) return;
    const u8* row[MATVEC_ROWS];
    float sum[MATVEC_ROWS];
#pragma unroll
    for (int i = 0; i < MATVEC_ROWS; ++i) {
        // Behind the last row the last one is computed again, and not written.
        row[i] = w + min(first + i, rows - 1) * row_bytes<Type>(columns);
        sum[i] = 0.0f;
    }
#pragma unroll 2
    for (int piece = lane; piece < columns / PIECE_VALUES; piece += 32) {
        const int column = column_of<Type>(piece);
        float x_low[8], x_high[8];
        load_floats(x + column, x_low);
        load_floats(x + column + Type::APART, x_high);
#pragma unroll
        for (int i = 0; i < MATVEC_ROWS; ++i) {
            float low[8], high[8];
            Type::piece(block_of<Type>(row[i], piece), piece_in_block<Type>(piece), low, high);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sum[i] = fmaf(low[j], x_low[j], sum[i]);
                sum[i] = fmaf(high[j], x_high[j], sum[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MATVEC_ROWS; ++i)
#pragma unroll
        for (int bits = 16; bits; bits /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], bits);
    if (lane) return;
#pragma unroll
    for (int i = 0; i < MATVEC_ROWS; ++i) {
        const int at = first + i;
        if (at < rows) y[at] = sum[i] + (bias ? bias[at] : 0.0f) + (add ? add[at] : 0.0f);
    }
}

#define MATVEC(NAME, TYPE)                                                                     \
    extern "C" __global__ void __launch_bounds__(128) matvec_##NAME(                           \
        const u8* w, const float* x, float* y, const float* bias, const float* add, int rows, \
        int columns) {                                                                         \
        matvec<TYPE>(w, x, y, bias, add, rows, columns);                                       \
    }
TYPES(MATVEC)  // those that kernel_source.py chose
#undef MATVEC
