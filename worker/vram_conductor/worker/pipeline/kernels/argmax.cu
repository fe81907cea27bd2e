// The most likely entry of the vocabulary, chunk of the head by chunk.
//
// logits: [tokens][rows], of the entries from `first` on; best, best_token: [tokens], what is best in
// the chunks before, nothing for the first one. Of equals the lowest counts; what is no number counts
// as lowest of all. One block of whole warps per token.
extern "C" __global__ void argmax(const float* logits, float* best, int* best_token, int first,
                                  int rows) {
    const float LOWEST = -3.4e38f;
    const float* const row = logits + (long long)blockIdx.x * rows;
    float value = LOWEST;
    int token = first + threadIdx.x;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        if (row[i] > value) {
            value = row[i];
            token = first + i;
        }
    }
    __shared__ float values[32];
    __shared__ int tokens[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int pass = 0; pass < 2; ++pass) {
        for (int bits = 16; bits > 0; bits >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, value, bits);
            const int of = __shfl_xor_sync(0xffffffffu, token, bits);
            if (other > value || (other == value && of < token)) {
                value = other;
                token = of;
            }
        }
        if (pass == 1) break;
        if (lane == 0) {
            values[warp] = value;
            tokens[warp] = token;
        }
        __syncthreads();
        value = lane < warps ? values[lane] : LOWEST;
        token = lane < warps ? tokens[lane] : 0x7fffffff;
    }
    if (threadIdx.x == 0 && (first == 0 || value > best[blockIdx.x])) {
        best[blockIdx.x] = value;
        best_token[blockIdx.x] = token;
    }
}
