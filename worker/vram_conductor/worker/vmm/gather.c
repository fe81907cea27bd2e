/* Copies that go together, also preloaded: cudaMemcpyAsync and cudaStreamSynchronize.
 *
 * llama.cpp copies a sequence's state tensor by tensor and run of cells by run of cells, and waits
 * for every piece: some ten microseconds each, in which nothing is copied. Two sequences that
 * generate side by side take cells in turns, and then every cell is a piece of its own. Between
 * vmm_gather_begin() and vmm_gather_end() of a thread its copies between host and device are only
 * put on their stream, small ones that lie at regular distances as one, and the thread waits at the
 * end, or where so much is under way that others who copy would notice. Whoever gathers sees to it
 * that nothing reads what is being copied before that.
 *
 * Other threads, and everything outside of the two calls, meet the runtime's own functions. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vmm.h"
#include "way.h"

typedef int cudaError;
typedef void *cudaStream;

enum { SUCCESS = 0, NOT_INITIALIZED = 3, TO_DEVICE = 1, TO_HOST = 2 };
#define ROW_MAX ((size_t)32 << 10) /* a wider piece takes longer to copy than to put on a stream */
#ifndef AHEAD
#define AHEAD ((size_t)32 << 20) /* under way at most: what others copy meanwhile waits behind it */
#endif
#define STEP_MAX ((size_t)1 << 30) /* a pitch of the runtime's 2D copy is below 2^31 */

/* Rows of `width` bytes, each `to_step` and `from_step` behind the one before. */
typedef struct {
    uintptr_t to, from;
    size_t width, to_step, from_step, rows;
} Run;

static _Thread_local struct {
    int depth;
    Run run; /* not on its stream yet; rows is 0 where there is none */
    int kind;
    cudaStream stream;
    size_t ahead; /* bytes on the stream that nobody has waited for */
    bool has_way; /* some of them go to the device: who wakes a model waits */
    cudaError failed; /* the first error */
} own;

static cudaError real_copy(uintptr_t to, uintptr_t from, size_t n, int kind, cudaStream stream)
{
    typedef cudaError (*Copy)(void *, const void *, size_t, int, cudaStream);
    static _Atomic(Copy) function; /* two threads store the same */
    if (!function) function = (Copy)vmm_real("cudaMemcpyAsync");
    if (!function) return NOT_INITIALIZED;
    return function((void *)to, (const void *)from, n, kind, stream);
}

static cudaError real_copy_rows(const Run *run, int kind, cudaStream stream)
{
    typedef cudaError (*Copy)(void *, size_t, const void *, size_t, size_t, size_t, int, cudaStream);
    static _Atomic(Copy) function;
    if (!function) function = (Copy)vmm_real("cudaMemcpy2DAsync");
    if (!function) return NOT_INITIALIZED;
    return function((void *)run->to, run->to_step, (const void *)run->from, run->from_step,
                    run->width, run->rows, kind, stream);
}

static cudaError real_wait(cudaStream stream)
{
    typedef cudaError (*Wait)(cudaStream);
    static _Atomic(Wait) function;
    if (!function) function = (Wait)vmm_real("cudaStreamSynchronize");
    return function ? function(stream) : NOT_INITIALIZED;
}

static void note(cudaError error)
{
    if (error != SUCCESS && own.failed == SUCCESS) own.failed = error;
}

static void wait_for(void)
{
    if (own.ahead) note(real_wait(own.stream));
    own.ahead = 0;
    if (own.has_way) way_leave();
    own.has_way = false;
}

/* Before a copy of what was gathered goes on its stream. */
static void make_way(void)
{
    if (own.ahead >= AHEAD) wait_for();
    if (own.kind == TO_DEVICE && !own.has_way) {
        way_take();
        own.has_way = true;
    }
}

/* Put what was gathered on its stream. */
static void flush(void)
{
    Run *run = &own.run;
    for (size_t at = 0, n; run->rows == 1 && at < run->width; at += n) {
        make_way();
        n = run->width - at < AHEAD ? run->width - at : AHEAD;
        note(real_copy(run->to + at, run->from + at, n, own.kind, own.stream));
        own.ahead += n;
    }
    if (run->rows > 1) {
        make_way();
        note(real_copy_rows(run, own.kind, own.stream));
        own.ahead += run->rows * run->width;
    }
    run->rows = 0;
}

static void finish(void)
{
    flush();
    wait_for();
}

/* Whether a copy continues what was gathered; if so it belongs to it now. */
static bool joins(uintptr_t to, uintptr_t from, size_t n)
{
    Run *run = &own.run;
    size_t to_step = to - run->to, from_step = from - run->from;
    if (!run->rows) return false;
    if (run->rows == 1 && to_step == run->width && from_step == run->width) {
        run->width += n;
        return true;
    }
    /* Whole tensors stay copies of their own: one by one they go at the full rate of the bus, as rows
     * at odd distances they do not. */
    if (n != run->width || n > ROW_MAX) return false;
    if (run->rows == 1) {
        /* Backwards is further than any step. */
        if (to_step < n || from_step < n || to_step >= STEP_MAX || from_step >= STEP_MAX)
            return false;
        run->to_step = to_step;
        run->from_step = from_step;
    } else if (to_step != run->rows * run->to_step || from_step != run->rows * run->from_step) {
        return false;
    }
    run->rows++;
    return true;
}

API cudaError cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, cudaStream stream)
{
    uintptr_t target = (uintptr_t)to, source = (uintptr_t)from;
    if (!own.depth || (kind != TO_DEVICE && kind != TO_HOST) || !n) {
        if (own.depth) finish();
        return real_copy(target, source, n, kind, stream);
    }
    if ((own.run.rows || own.ahead) && stream != own.stream) finish();
    if (own.run.rows && kind != own.kind) flush();
    if (!joins(target, source, n)) {
        flush();
        own.run = (Run){.to = target, .from = source, .width = n, .rows = 1};
        own.kind = kind;
        own.stream = stream;
    }
    return SUCCESS;
}

API cudaError cudaStreamSynchronize(cudaStream stream)
{
    bool ours = own.depth && (own.run.rows || own.ahead) && stream == own.stream;
    return ours ? SUCCESS : real_wait(stream);
}

API void vmm_gather_begin(void)
{
    if (!own.depth++) own.failed = SUCCESS;
}

/* Everything has been copied when the outermost end returns; the first error, 0 if there is none. */
API int vmm_gather_end(void)
{
    if (own.depth == 1) finish();
    own.depth--;
    return own.failed;
}
