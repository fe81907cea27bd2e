// Every value of a tensor as float32, for tests of formats.cu: `pieces` of 16 values, one per thread.
template <class Type>
__device__ inline void dequantise(const u8* w, float* out, int pieces) {
    const int piece = blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= pieces) return;
    float low[8], high[8];
    Type::piece(block_of<Type>(w, piece), piece_in_block<Type>(piece), low, high);
    float* const at = out + column_of<Type>(piece);
    for (int i = 0; i < 8; ++i) {
        at[i] = low[i];
        at[i + Type::APART] = high[i];
    }
}

#define DEQUANTISE(TYPE)                                                                          \
    extern "C" __global__ void dequantise_##TYPE(const u8* w, float* out, int pieces) {           \
        dequantise<TYPE>(w, out, pieces);                                                         \
    }
DEQUANTISE(F32)
DEQUANTISE(F16)
DEQUANTISE(Q8_0)
DEQUANTISE(Q4_0)
DEQUANTISE(Q4_1)
DEQUANTISE(Q5_0)
DEQUANTISE(Q4_K)
DEQUANTISE(Q6_K)

extern "C" __global__ void halves_to_floats(const half* x, float* y, half* back, int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    y[at] = half_to_float(x[at]);
    back[at] = float_to_half(y[at]);
}
extern "C" __global__ void floats_to_halves(const float* x, half* y, int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) y[at] = float_to_half(x[at]);
}
