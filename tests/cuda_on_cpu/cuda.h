// What CUDA C++ offers a kernel, for the CPU: enough to see what a kernel computes, not how fast.
//
// Stricter than a GPU: a barrier that not all reach, a warp's exchange without a lane of its mask
// and a load or store at an address that isn't a multiple of its width, or where nothing is, end the
// launch with an error (a GPU hangs, is undefined, faults). Dynamic shared memory is poisoned for
// every block.
#pragma once

#include <cmath>
#include <csignal>
#include <type_traits>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

#define threadIdx (cuda_on_cpu::current->index)
#define blockIdx (cuda_on_cpu::block_index)
#define blockDim (cuda_on_cpu::block_size)
#define gridDim (cuda_on_cpu::grid_size)
constexpr int warpSize = 32;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline void __syncthreads(int line = __builtin_LINE()) {
    cuda_on_cpu::wait(cuda_on_cpu::Waits::block, line);
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    cuda_on_cpu::wait(cuda_on_cpu::Waits::warp, line, mask);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace cuda_on_cpu {

// Brings `mine` and waits for the lanes of the mask; what they brought is then had from `of_lane`.
template <class T>
void exchange(unsigned mask, const T& mine, int line) {
    static_assert(sizeof(T) <= DEPOSIT_BYTES && std::is_trivially_copyable_v<T>);
    if (!(mask >> current->number % WARP & 1)) fail("line %d: a lane outside its own mask", line);
    memcpy(current->deposit, &mine, sizeof mine);
    wait(Waits::warp, line, mask);
}

template <class T>
T of_lane(int lane, int line) {
    const Fiber* other = lane_of(*current, lane);
    if (!other || !(current->mask >> lane & 1)) fail("line %d: lane %d did not come", line, lane);
    T theirs;
    memcpy(&theirs, other->published, sizeof theirs);
    return theirs;
}

template <class T>
T from_lane(unsigned mask, const T& mine, int lane, int line) {
    exchange(mask, mine, line);
    return of_lane<T>(lane, line);
}

inline int lane() { return current->number % WARP; }

}  // namespace cuda_on_cpu

template <class T>
T __shfl_sync(unsigned mask, T mine, int from, int width = 32, int line = __builtin_LINE()) {
    const int first = cuda_on_cpu::lane() / width * width;
    return cuda_on_cpu::from_lane(mask, mine, first + (from & (width - 1)), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T mine, int bits, int width = 32, int line = __builtin_LINE()) {
    const int at = cuda_on_cpu::lane(), from = at ^ bits;
    return cuda_on_cpu::from_lane(mask, mine, from / width > at / width ? at : from, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T mine, unsigned by, int width = 32,
                   int line = __builtin_LINE()) {
    const int at = cuda_on_cpu::lane(), from = at + int(by);
    return cuda_on_cpu::from_lane(mask, mine, from / width != at / width ? at : from, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T mine, unsigned by, int width = 32, int line = __builtin_LINE()) {
    const int at = cuda_on_cpu::lane(), from = at - int(by);
    return cuda_on_cpu::from_lane(mask, mine, from < at / width * width ? at : from, line);
}
inline unsigned __ballot_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
    cuda_on_cpu::exchange(mask, vote, line);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && cuda_on_cpu::lane_of(*cuda_on_cpu::current, lane))
            votes |= unsigned(cuda_on_cpu::of_lane<int>(lane, line) != 0) << lane;
    return votes;
}
inline int __any_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
    return __ballot_sync(mask, vote, line) != 0;
}
inline int __all_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
    return __ballot_sync(mask, !vote, line) == 0;
}

template <class T>
T __ldg(const T* address) { return *address; }
template <class T>
T atomicAdd(T* address, T by) { T old = *address; *address += by; return old; }
template <class T, class U>
constexpr auto min(T a, U b) { using C = std::common_type_t<T, U>; return C(a) < C(b) ? C(a) : C(b); }
template <class T, class U>
constexpr auto max(T a, U b) { using C = std::common_type_t<T, U>; return C(a) > C(b) ? C(a) : C(b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, sizeof y); return y; }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }

// IEEE binary16, as its 16 bits. All values from a table: without an instruction for it the compiler's
// own function took a third of all tests' time.
namespace cuda_on_cpu {
struct Halves {
    float values[1 << 16];
    Halves() {
        for (unsigned bits = 0; bits < 1 << 16; ++bits) {
            const unsigned short stored = (unsigned short)bits;
            _Float16 x;
            memcpy(&x, &stored, sizeof x);
            values[bits] = float(x);
        }
    }
};
inline const Halves halves;
}  // namespace cuda_on_cpu
inline float half_to_float(unsigned short bits) { return cuda_on_cpu::halves.values[bits]; }
inline unsigned short float_to_half(float x) {
    const _Float16 rounded = _Float16(x);
    unsigned short bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}

namespace cuda_on_cpu {

// For `extern __shared__ T name[];`, which the build turns into a pointer to this.
inline void* dynamic_shared() {
    return reinterpret_cast<void*>((uintptr_t(shared_arena.data()) + 127) / 128 * 128);
}

template <class T>
constexpr char kind_of() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, float>) return 'f';
    if (std::is_same_v<T, double>) return 'd';
    return sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'l' : '?';
}

inline void say_fault(int number, siginfo_t* info, void*) {
    if (!current) abort();  // not a kernel's fault
    if (number == SIGFPE) fail("an integer is divided by 0");
    fail("nothing may be read or written at %p", info->si_addr);
}

// While it lives, faults end the launch and not the process.
class Faults {
  public:
    Faults() {
        struct sigaction ours {};
        ours.sa_sigaction = say_fault;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;  // fail() doesn't return
        for (int at = 0; at < 3; ++at) sigaction(NUMBERS[at], &ours, &before_[at]);
    }
    ~Faults() {
        for (int at = 0; at < 3; ++at) sigaction(NUMBERS[at], &before_[at], nullptr);
    }

  private:
    static constexpr int NUMBERS[3] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction before_[3];
};

// Returns what went wrong, or an empty string. `kinds`: what the caller passes, see kind_of.
template <class... P>
const char* launch(void (*kernel)(P...), const unsigned* grid, const unsigned* block,
                   unsigned shared_bytes, void** arguments, const char* kinds) {
    const char wanted[] = {kind_of<P>()..., 0};
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    error[0] = 0;
    if (strcmp(wanted, kinds))
        snprintf(error, sizeof error, "takes arguments of kinds %s, got %s", wanted, kinds);
    else if (threads < 1 || threads > THREADS_MAX)
        snprintf(error, sizeof error, "a block has 1 to 1024 threads, not %lu", threads);
    else if (grid[0] < 1 || grid[1] < 1 || grid[2] < 1 || grid[1] > 65535 || grid[2] > 65535)
        snprintf(error, sizeof error, "no grid: %u,%u,%u", grid[0], grid[1], grid[2]);
    else if (shared_bytes > SHARED_BYTES_MAX)
        snprintf(error, sizeof error, "%u bytes of shared memory are too many", shared_bytes);
    if (error[0]) return error;
    shared_arena.resize(shared_bytes + 128);
    kernel_call = [=] {
        [=]<size_t... I>(std::index_sequence<I...>) {
            kernel(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
        }(std::index_sequence_for<P...>{});
    };
    const Faults faults;
    run_grid();
    return error;
}

}  // namespace cuda_on_cpu

// Called by code compiled with -fsanitize=alignment; the layout is that of GCC's libubsan.
struct Misalignment {
    const char* file;
    unsigned line, column;
    const void* type;
    unsigned char log_alignment, kind;
};
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(Misalignment* what,
                                                                             void* address) {
    cuda_on_cpu::fail("%s:%u: the address %p is not a multiple of %d", what->file, what->line,
                      address, 1 << what->log_alignment);
}
