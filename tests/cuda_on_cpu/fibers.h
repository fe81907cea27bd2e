// The threads of a block as fibers of one thread of the host. Each runs until it ends or waits (at
// a barrier of its block or of its warp); who waits goes on once all have arrived. The order in
// which they run is random with a fixed seed, so that a forgotten barrier shows.
#pragma once

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

struct uint3 { unsigned x, y, z; };

namespace cuda_on_cpu {

constexpr int WARP = 32;
constexpr int THREADS_MAX = 1024;
constexpr unsigned SHARED_BYTES_MAX = 227 << 10;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t DEPOSIT_BYTES = 32;

enum class Waits { nothing, block, warp, ended };

struct Fiber {
    uint3 index;
    int number;                              // linear, within the block
    Waits waits;
    int line;                                // of the source, where it waits
    unsigned mask;                           // lanes of the warp that it waits for
    unsigned char deposit[DEPOSIT_BYTES];    // what it brings to a warp's exchange …
    unsigned char published[DEPOSIT_BYTES];  // … and, once all have come, what others see of it
    bool started;
    jmp_buf resume;
    ucontext_t context;
};

inline std::vector<Fiber> fibers;
inline Fiber* current;
inline char* stacks;
inline jmp_buf scheduler;
inline std::function<void()> kernel_call;
inline uint3 block_index, block_size, grid_size;
inline std::vector<unsigned char> shared_arena;
inline uint64_t chance;
inline char error[512];

// A number below `below`, by xorshift.
inline size_t draw(size_t below) {
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return (chance >> 11) % below;
}

inline void shuffle(std::vector<int>& order) {
    for (size_t left = order.size(); left > 1; --left)
        std::swap(order[left - 1], order[draw(left)]);
}

inline int n_threads() { return int(fibers.size()); }

[[noreturn]] inline void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    const int n = vsnprintf(error, sizeof error, format, values);
    va_end(values);
    snprintf(error + n, sizeof error - n, " (block %u,%u,%u, thread %u,%u,%u)", block_index.x,
             block_index.y, block_index.z, current->index.x, current->index.y, current->index.z);
    _longjmp(scheduler, 1);
}

inline void wait(Waits what, int line, unsigned mask = 0) {
    current->waits = what;
    current->line = line;
    current->mask = mask;
    if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

inline void fiber_main() {
    for (;;) {  // once for each block of the grid
        kernel_call();
        wait(Waits::ended, 0);
    }
}

// Runs it until it waits, ends or fails.
inline void resume(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + fiber.number * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, fiber_main, 0);
    setcontext(&fiber.context);
}

inline Fiber* lane_of(const Fiber& fiber, int lane) {
    const int number = fiber.number / WARP * WARP + lane;
    return lane >= 0 && lane < WARP && number < n_threads() ? &fibers[number] : nullptr;
}

// Whether everybody whom this fiber waits for in its warp waits at the same place.
inline bool warp_has_come(const Fiber& fiber) {
    for (int lane = 0; lane < WARP; ++lane) {
        const Fiber* other = fiber.mask >> lane & 1 ? lane_of(fiber, lane) : nullptr;
        if (!other) continue;  // not waited for, or the block's last warp is not full
        if (other->waits != Waits::warp || other->line != fiber.line || other->mask != fiber.mask)
            return false;
    }
    return true;
}

inline bool same_wait(const Fiber& one, const Fiber& other) {
    return one.number / WARP == other.number / WARP && one.mask == other.mask;
}

inline void release_warp_of(const Fiber& fiber) {
    const unsigned mask = fiber.mask;
    for (int lane = 0; lane < WARP; ++lane) {
        Fiber* other = mask >> lane & 1 ? lane_of(fiber, lane) : nullptr;
        if (!other) continue;
        other->waits = Waits::nothing;
        memcpy(other->published, other->deposit, DEPOSIT_BYTES);
    }
}

// Only some of those that could go on do, so that warps run ahead of each other: without a barrier
// between the last use of shared memory and the next one's first, somebody sees the wrong one.
inline bool release_warps() {
    bool any = false;
    const Fiber* held_back = nullptr;
    for (const Fiber& fiber : fibers) {
        if (fiber.waits != Waits::warp || !warp_has_come(fiber)) continue;
        if (held_back && same_wait(fiber, *held_back)) continue;
        if (draw(2)) {
            any = true;
            release_warp_of(fiber);
        } else {
            held_back = &fiber;
        }
    }
    if (!any && held_back) release_warp_of(*held_back);
    return any || held_back;
}

// Threads that have ended count as arrived.
inline bool release_block() {
    const Fiber* first = nullptr;
    for (const Fiber& fiber : fibers) {
        if (fiber.waits == Waits::ended) continue;
        if (fiber.waits != Waits::block) return false;
        if (!first) first = &fiber;
        if (fiber.line != first->line) return false;
    }
    for (Fiber& fiber : fibers)
        if (fiber.waits == Waits::block) fiber.waits = Waits::nothing;
    return first != nullptr;
}

inline void say_stuck() {
    for (const Fiber& fiber : fibers) {
        if (fiber.waits == Waits::ended) continue;
        snprintf(error, sizeof error,
                 "thread %d of block %u,%u,%u waits at line %d for others of its %s, who wait "
                 "elsewhere or have ended",
                 fiber.number, block_index.x, block_index.y, block_index.z, fiber.line,
                 fiber.waits == Waits::warp ? "warp" : "block");
        return;
    }
}

inline void run_block(std::vector<int>& order) {
    memset(shared_arena.data(), 0xFF, shared_arena.size());  // NaN as f16, f32 and f64
    for (Fiber& fiber : fibers) fiber.waits = Waits::nothing;
    for (size_t ended = 0; ended < fibers.size();) {
        shuffle(order);
        for (const int at : order) {
            if (fibers[at].waits != Waits::nothing) continue;
            resume(fibers[at]);
            if (error[0]) return;
            ended += fibers[at].waits == Waits::ended;
        }
        if (ended == fibers.size()) return;
        if (!release_warps() && !release_block()) return say_stuck();
    }
}

// Blocks run one after another.
inline void run_grid() {
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    fibers.assign(threads, Fiber{});
    for (unsigned at = 0; at < threads; ++at) {
        fibers[at].number = int(at);
        fibers[at].index = {at % block_size.x, at / block_size.x % block_size.y,
                            at / block_size.x / block_size.y};
    }
    if (!stacks)
        stacks = static_cast<char*>(mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    chance = 88172645463325252u;
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    for (unsigned z = 0; z < grid_size.z; ++z)
        for (unsigned y = 0; y < grid_size.y; ++y)
            for (unsigned x = 0; x < grid_size.x && !error[0]; ++x) {
                block_index = {x, y, z};
                run_block(order);
            }
}

}  // namespace cuda_on_cpu
