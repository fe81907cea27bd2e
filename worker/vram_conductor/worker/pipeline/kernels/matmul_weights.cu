// A lane's part of a row of weights, for tensor cores. What the blocks look like: see formats.cu.
//
// Four lanes share 128 columns of a row, a step. Each has 32 of them, whichever are the fewest
// loads in its type: the product's sum has no order, as long as weights and activations are paired
// rightly. They come as 4 octets of 8 successive columns:
//   octet(part, i): which of the step's 16 octets is the i-th of lane `part`
//   load: only loads, so that it can run ahead by a step. What it loads beyond the last column is
//     any of the row: the activations are 0 there.
//   values(part, i): unpacks that octet
#ifdef TENSOR_CORES

namespace matmul {

const int STEP = 128;

template <class Type>
struct Part;

// 4 N - 2 bytes from an even address on, in the N aligned words that hold them.
template <int N>
struct Window {
    unsigned words[N];
    unsigned late;  // by how many bytes it begins after the first word does: 0 or 2

    __device__ void load(const u8* from) {
        late = (unsigned)(unsigned long long)from & 2;
        const unsigned* aligned = (const unsigned*)(from - late);
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = aligned[i];
    }
    // Four bytes from byte `at` on, an even number.
    __device__ unsigned word(int at) const {
        const int first = at / 4, second = first + 1 < N ? first + 1 : first;
        return permute(words[first], words[second], 0x3210u + 0x2222u * (at % 4 / 2 + late / 2));
    }
};

// The low or the high nibbles of four bytes.
__device__ inline unsigned nibbles_of(unsigned word, int high) {
    return word >> 4 * high & 0x0F0F0F0Fu;
}

// Of four bytes q: (q - offset) . factor + more.
__device__ inline void unpack(unsigned q, int offset, Pair factor, Pair more, Pair* out) {
    out[0] = fused(bytes_less(q, 0, offset), factor, more);
    out[1] = fused(bytes_less(q, 2, offset), factor, more);
}

// A type with 32 values in a block: a lane has one block.
template <class Type, int WORDS>
struct BlockPart {
    Window<WORDS> block;

    static __device__ int octet(int part, int i) { return 4 * part + i; }
    __device__ void load(const u8* row, int columns, int step, int part) {
        block.load(row + (long long)min(4 * step + part, columns / 32 - 1) * Type::BLOCK_BYTES);
    }
};

template <>
struct Part<Q4_0> : BlockPart<Q4_0, 5> {
    __device__ void values(int, int i, Pair (&out)[4]) const {
        const Pair d = both_of_half(block.word(0));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned q = nibbles_of(block.word(2 + i % 2 * 8 + 4 * k), i / 2);
            unpack(q, 8, d, NOTHING, out + 2 * k);
        }
    }
};

template <>
struct Part<Q4_1> : BlockPart<Q4_1, 5> {
    __device__ void values(int, int i, Pair (&out)[4]) const {
        const Pair d = both_of_half(block.word(0)), m = both_of_half(block.word(0) >> 16);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned q = nibbles_of(block.word(4 + i % 2 * 8 + 4 * k), i / 2);
            unpack(q, 0, d, m, out + 2 * k);
        }
    }
};

template <>
struct Part<Q5_0> : BlockPart<Q5_0, 6> {
    __device__ void values(int, int i, Pair (&out)[4]) const {
        const Pair d = both_of_half(block.word(0));
        const unsigned fifths = block.word(2) >> 8 * i;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            // Bit j to bit 4 of byte j, which is 4 + 7 j further on: a product with bits 4, 11, 18
            // and 25 has each there, once, and others elsewhere.
            const unsigned fifth = (fifths >> 4 * k & 15) * 0x02040810u & 0x10101010u;
            const unsigned q = nibbles_of(block.word(6 + i % 2 * 8 + 4 * k), i / 2) | fifth;
            unpack(q, 16, d, NOTHING, out + 2 * k);
        }
    }
};

template <>
struct Part<Q8_0> : BlockPart<Q8_0, 9> {
    __device__ void values(int, int i, Pair (&out)[4]) const {
        const Pair d = both_of_half(block.word(0));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned q = block.word(2 + 8 * i + 4 * k) ^ 0x80808080u;  // + 128
            unpack(q, 128, d, NOTHING, out + 2 * k);
        }
    }
};

// A block is two steps. A lane has 16 of a step's 64 bytes of nibbles.
template <>
struct Part<Q4_K> {
    uint4 head, packed;
    int half_block;  // which of the two steps

    static __device__ int octet(int part, int i) {
        return part / 2 * 8 + i / 2 * 4 + part % 2 * 2 + i % 2;
    }
    __device__ void load(const u8* row, int columns, int step, int part) {
        step = min(step, columns / STEP - 1);
        const uint4* block = (const uint4*)(row + (long long)(step / 2) * Q4_K::BLOCK_BYTES);
        half_block = step % 2;
        head = block[0];
        packed = block[1 + 4 * half_block + part];
    }
    __device__ void values(int part, int i, Pair (&out)[4]) const {
        // The step's 4 scales and 4 offsets, a byte each; then this octet's of them.
        unsigned scales = head.y & 0x3F3F3F3Fu, offsets = head.z & 0x3F3F3F3Fu;
        if (half_block) {
            scales = nibbles_of(head.w, 0) | (head.y >> 2 & 0x30303030u);
            offsets = nibbles_of(head.w, 1) | (head.z >> 2 & 0x30303030u);
        }
        const int shift = 8 * (part / 2 * 2 + i / 2);
        const float factor = half_to_float((half)head.x) * (float)(scales >> shift & 63);
        const float lower = half_to_float((half)(head.x >> 16)) * (float)(offsets >> shift & 63);
        // With q - 8 the offset is small, and rounding it costs less.
        const Pair a = both(factor), b = both(8.0f * factor - lower);
        const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned q = nibbles_of(words[i % 2 * 2 + k], i / 2);
            unpack(q, 8, a, b, out + 2 * k);
        }
    }
};

// A block is two steps. A lane has bytes 8 part .. 8 part + 7 of each 32.
template <>
struct Part<Q6_K> {
    Window<3> low[2];  // bits 0-3, of octets 0 and 2, of 1 and 3
    Window<3> high;    // bits 4-5
    Window<3> scales;  // the step's 8
    half d;

    static __device__ int octet(int part, int i) { return 4 * i + part; }
    __device__ void load(const u8* row, int columns, int step, int part) {
        step = min(step, columns / STEP - 1);
        const u8* block = row + (long long)(step / 2) * Q6_K::BLOCK_BYTES;
        const int half_block = step % 2;
        low[0].load(block + 64 * half_block + 8 * part);
        low[1].load(block + 64 * half_block + 32 + 8 * part);
        high.load(block + 128 + 32 * half_block + 8 * part);
        scales.load(block + 192 + 8 * half_block);
        d = load_half(block + 208);
    }
    __device__ void values(int part, int i, Pair (&out)[4]) const {
        const int shift = 8 * (i % 2 * 2 + part / 2);
        const int scale = (signed char)(scales.word(i / 2 * 4) >> shift);
        const Pair factor = both(half_to_float(d) * (float)scale);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned bits = high.word(4 * k) >> 2 * i & 0x03030303u;
            const unsigned q = nibbles_of(low[i % 2].word(4 * k), i / 2) | bits << 4;
            unpack(q, 32, factor, NOTHING, out + 2 * k);
        }
    }
};

// Without blocks a lane has every fourth octet: what the four lanes load lies together.
struct SpreadPart {
    static __device__ int octet(int part, int i) { return 4 * i + part; }
    static __device__ int column(int columns, int step, int part, int i) {
        return 8 * min(STEP / 8 * step + octet(part, i), columns / 8 - 1);
    }
};

template <>
struct Part<F16> : SpreadPart {
    uint4 pairs[4];

    __device__ void load(const u8* row, int columns, int step, int part) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = *(const uint4*)((const half*)row + column(columns, step, part, i));
    }
    __device__ void values(int, int i, Pair (&out)[4]) const {
        out[0] = pairs[i].x, out[1] = pairs[i].y, out[2] = pairs[i].z, out[3] = pairs[i].w;
    }
};

// Loaded when they are unpacked: a step ahead they would take more registers than there are.
template <>
struct Part<F32> : SpreadPart {
    const float* row;
    int columns, step;

    __device__ void load(const u8* from, int n, int at, int) {
        row = (const float*)from, columns = n, step = at;
    }
    __device__ void values(int part, int i, Pair (&out)[4]) const {
        float eight[8];
        load_floats(row + column(columns, step, part, i), eight);
#pragma unroll
        for (int k = 0; k < 4; ++k) out[k] = pair_of(eight[2 * k], eight[2 * k + 1]);
    }
};

}  // namespace matmul

#endif
