// Rotary position embedding, https://arxiv.org/abs/2104.09864: pair i of each head is turned by
// position . inverse_frequency[i] and scaled by `magnitude` (YaRN's; otherwise 1).
//
// x: [tokens][heads][head_dim], in place; values from n_rot on stay. A pair is (2 i, 2 i + 1), or
// (i, i + n_rot / 2) if `halves`. One thread per pair.
extern "C" __global__ void rope(float* x, const int* position, const float* inverse_frequency,
                                float magnitude, int tokens, int heads, int head_dim, int n_rot,
                                int halves) {
    const int pairs = n_rot / 2;
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)tokens * heads * pairs) return;
    const int pair = at % pairs;
    const long long head = at / pairs;

    // A float32 angle near 100,000 is wrong by 0.004 radians (llama.cpp takes it so). What the
    // product lost is exact in a second float32, and small enough for the first terms.
    const float turns = position[head / heads], frequency = inverse_frequency[pair];
    const float angle = turns * frequency, lost = fmaf(turns, frequency, -angle);
    float sine, cosine;
    sincosf(angle, &sine, &cosine);  // the whole range: not the fast one
    const float bent = fmaf(-0.5f * lost, lost, 1.0f);
    const float sin_all = fmaf(sine, bent, cosine * lost) * magnitude;
    const float cos_all = fmaf(cosine, bent, -sine * lost) * magnitude;

    float* const first = x + head * head_dim + (halves ? pair : 2 * pair);
    float* const second = first + (halves ? pairs : 1);
    const float a = *first, b = *second;
    *first = a * cos_all - b * sin_all;
    *second = a * sin_all + b * cos_all;
}
