// Weights as a GGUF stores them, taken apart. The block formats are those of
// https://github.com/ggml-org/ggml (ggml-common.h, ggml-quants.c), little-endian; d, m, dmin are f16.
//
// A row is a sequence of blocks. What a thread takes apart at once is a piece: 16 values, in two runs
// of 8 that lie APART values from each other, because the low nibbles of 8 bytes belong to one run
// and the high ones to the other. A type is a struct:
//   BLOCK_VALUES, BLOCK_BYTES, APART
//   piece(block, at, low, high): the values of piece `at` of a block; for column_of see below
// Rows of F32 and F16 have no blocks: theirs are one piece. So the columns of a matrix are a
// multiple of 16, 32 or 256 (BLOCK_VALUES). A tensor's first byte is aligned to 16; blocks of Q8_0,
// Q4_0, Q5_0 and Q6_K then are to 2 only, and are read two bytes at a time.

typedef unsigned char u8;
typedef unsigned short half;  // IEEE binary16, as its bits: no header knows it here

#ifndef CUDA_ON_CPU  // which brings its own
__device__ inline float half_to_float(half bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ inline half float_to_half(float x) {
    half bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

const int PIECE_VALUES = 16;

// The column in its row at which a piece's low run begins.
template <class Type>
__device__ inline int column_of(int piece) {
    const int runs = Type::APART / 8;
    return piece / runs * (2 * Type::APART) + piece % runs * 8;
}

// The block that piece `piece` of a row lies in, and which of the block's pieces it is.
template <class Type>
__device__ inline const u8* block_of(const u8* row, int piece) {
    return row + (long long)(piece / (Type::BLOCK_VALUES / PIECE_VALUES)) * Type::BLOCK_BYTES;
}
template <class Type>
__device__ inline int piece_in_block(int piece) {
    return piece % (Type::BLOCK_VALUES / PIECE_VALUES);
}
template <class Type>
__device__ inline long long row_bytes(int columns) {
    return (long long)(columns / Type::BLOCK_VALUES) * Type::BLOCK_BYTES;
}

__device__ inline half load_half(const u8* at) { return *(const half*)at; }

// Eight bytes at an address that is a multiple of ALIGNED.
template <int ALIGNED>
__device__ inline uint2 load_8(const u8* at) {
    if (ALIGNED == 8) return *(const uint2*)at;
    if (ALIGNED == 4) return make_uint2(((const unsigned*)at)[0], ((const unsigned*)at)[1]);
    return make_uint2(load_half(at) | (unsigned)load_half(at + 2) << 16,
                      load_half(at + 4) | (unsigned)load_half(at + 6) << 16);
}
__device__ inline unsigned byte_of(uint2 bytes, int i) {
    return (i < 4 ? bytes.x >> 8 * i : bytes.y >> 8 * (i - 4)) & 255;
}

// d . q + m for q = the low and the high nibbles of 8 bytes.
__device__ inline void nibbles(uint2 bytes, float d_low, float m_low, float d_high, float m_high,
                               float (&low)[8], float (&high)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned both = byte_of(bytes, i);
        low[i] = fmaf(d_low, (float)(both & 15), m_low);
        high[i] = fmaf(d_high, (float)(both >> 4), m_high);
    }
}

// Eight floats at an address that is a multiple of 16.
__device__ inline void load_floats(const float* at, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 four = *(const float4*)(at + i);
        out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
}

struct F32 {
    static const int BLOCK_VALUES = 16, BLOCK_BYTES = 64, APART = 8;
    __device__ static void piece(const u8* block, int, float (&low)[8], float (&high)[8]) {
        load_floats((const float*)block, low);
        load_floats((const float*)block + 8, high);
    }
};

struct F16 {
    static const int BLOCK_VALUES = 16, BLOCK_BYTES = 32, APART = 8;
    __device__ static void eight(uint4 pairs, float (&out)[8]) {
        const unsigned two[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[2 * i] = half_to_float((half)two[i]);
            out[2 * i + 1] = half_to_float((half)(two[i] >> 16));
        }
    }
    __device__ static void piece(const u8* block, int, float (&low)[8], float (&high)[8]) {
        eight(((const uint4*)block)[0], low);
        eight(((const uint4*)block)[1], high);
    }
};

// d; 32 int8 q. Value: d . q
struct Q8_0 {
    static const int BLOCK_VALUES = 32, BLOCK_BYTES = 34, APART = 8;
    __device__ static void piece(const u8* block, int at, float (&low)[8], float (&high)[8]) {
        const float d = half_to_float(load_half(block));
        const uint2 first = load_8<2>(block + 2 + 16 * at), second = load_8<2>(block + 10 + 16 * at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            low[i] = d * (float)(signed char)byte_of(first, i);
            high[i] = d * (float)(signed char)byte_of(second, i);
        }
    }
};

// d; 16 bytes: low nibbles are q of values 0-15, high ones of values 16-31. Value: d . (q - 8)
struct Q4_0 {
    static const int BLOCK_VALUES = 32, BLOCK_BYTES = 18, APART = 16;
    __device__ static void piece(const u8* block, int at, float (&low)[8], float (&high)[8]) {
        const float d = half_to_float(load_half(block)), m = -8.0f * d;
        nibbles(load_8<2>(block + 2 + 8 * at), d, m, d, m, low, high);
    }
};

// d; m; nibbles as in Q4_0. Value: d . q + m
struct Q4_1 {
    static const int BLOCK_VALUES = 32, BLOCK_BYTES = 20, APART = 16;
    __device__ static void piece(const u8* block, int at, float (&low)[8], float (&high)[8]) {
        const unsigned both = *(const unsigned*)block;
        const float d = half_to_float((half)both), m = half_to_float((half)(both >> 16));
        nibbles(load_8<4>(block + 4 + 8 * at), d, m, d, m, low, high);
    }
};

// d; 4 bytes: bit i is bit 4 of q of value i; nibbles as in Q4_0. Value: d . (q - 16)
struct Q5_0 {
    static const int BLOCK_VALUES = 32, BLOCK_BYTES = 22, APART = 16;
    __device__ static void piece(const u8* block, int at, float (&low)[8], float (&high)[8]) {
        const float d = half_to_float(load_half(block)), m = -16.0f * d;
        const uint2 bytes = load_8<2>(block + 6 + 8 * at);
        const unsigned bits_low = block[2 + at], bits_high = block[4 + at];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned both = byte_of(bytes, i);
            low[i] = fmaf(d, (float)((both & 15) | (bits_low >> i & 1) << 4), m);
            high[i] = fmaf(d, (float)(both >> 4 | (bits_high >> i & 1) << 4), m);
        }
    }
};

// d; dmin; 12 bytes: 8 scales and 8 offsets of 6 bits; 128 bytes of nibbles: of each 32 bytes, the low
// ones are q of 32 values and the high ones of the next 32. Value: d . scale . q - dmin . offset,
// with one scale and one offset for each 32 values.
//
// The first four scales are the low 6 bits of bytes 0-3, the first four offsets those of bytes 4-7.
// Of the others, bits 0-3 are the low (scale) or high (offset) nibble of bytes 8-11, and bits 4-5 the
// two bits left over in bytes 0-3 (scale) or 4-7 (offset).
struct Q4_K {
    static const int BLOCK_VALUES = 256, BLOCK_BYTES = 144, APART = 32;
    __device__ static void piece(const u8* block, int at, float (&low)[8], float (&high)[8]) {
        const uint4 head = *(const uint4*)block;
        const float d = half_to_float((half)head.x), dmin = half_to_float((half)(head.x >> 16));
        const int pair = at / 4, by = pair % 2 * 16;  // the 32 low values' scale is number 2 . pair
        // Two bytes each: that of the low values, that of the high ones.
        unsigned scales, offsets;
        if (pair < 2) {
            scales = head.y >> by & 0x3f3f;
            offsets = head.z >> by & 0x3f3f;
        } else {
            scales = (head.w >> by & 0x0f0f) | (head.y >> by & 0xc0c0) >> 2;
            offsets = (head.w >> by >> 4 & 0x0f0f) | (head.z >> by & 0xc0c0) >> 2;
        }
        nibbles(load_8<8>(block + 16 + 8 * at), d * (float)(scales & 255),
                -dmin * (float)(offsets & 255), d * (float)(scales >> 8),
                -dmin * (float)(offsets >> 8), low, high);
    }
};

// 128 bytes: bits 0-3 of q; 64 bytes: bits 4-5; 16 int8 scales; d. Value: d . scale . (q - 32), with one
// scale for each 16 values.
//
// Of each half of 128 values, 64 bytes hold the nibbles of values 0-63 (low) and 64-127 (high), and
// 32 bytes hold the two bits of the values +0, +32, +64, +96, from the lowest on.
struct Q6_K {
    static const int BLOCK_VALUES = 256, BLOCK_BYTES = 210, APART = 64;
    __device__ static void piece(const u8* block, int at, float (&low)[8], float (&high)[8]) {
        const int of_half = at / 8, in_half = at % 8;  // in_half . 8: the low run's first value
        const float d = half_to_float(load_half(block + 208));
        const signed char* scales = (const signed char*)block + 192 + 8 * of_half + in_half / 2;
        const float d_low = d * (float)scales[0], d_high = d * (float)scales[4];
        const uint2 bytes = load_8<2>(block + 8 * at);
        const uint2 pairs = load_8<2>(block + 128 + 32 * of_half + in_half % 4 * 8);
        const int by = in_half / 4 * 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned both = byte_of(bytes, i), two = byte_of(pairs, i) >> by;
            low[i] = d_low * (float)((int)((both & 15) | (two & 3) << 4) - 32);
            high[i] = d_high * (float)((int)(both >> 4 | (two >> 4 & 3) << 4) - 32);
        }
    }
};
