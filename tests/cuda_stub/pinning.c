/* A stand-in for libcuda.so.1: as much of the driver as pinning uses, on main memory.
 *
 * Registered ranges may not overlap, a copy must touch memory that is registered as a whole or not
 * at all (and, with STUB_NO_SPAN, in one range), everything needs a context, and STUB_LIMIT bytes
 * may be registered in all. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, TWICE = 712, UNKNOWN = 713 };
enum { SLOTS = 4096, PORTABLE = 1 };

static struct { uintptr_t at; size_t bytes; } ranges[SLOTS];
static int retained;
static _Thread_local int depth;
static char the_context;

int stub_retained(void) { return retained; }
int stub_depth(void) { return depth; }
uint64_t stub_registered(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < SLOTS; i++) sum += ranges[i].bytes;
    return sum;
}

R cuInit(unsigned flags) { return flags ? INVALID : OK; }
R cuGetErrorName(R result, const char **name)
{
    *name = result == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *name ? OK : INVALID;
}
R cuDeviceGet(int *device, int ordinal)
{
    *device = 7;
    return ordinal == 0 && !getenv("STUB_NO_DEVICE") ? OK : 101;
}
R cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (device != 7) return INVALID;
    retained++;
    *context = &the_context;
    return OK;
}
R cuDevicePrimaryCtxRelease_v2(int device) { return device == 7 && retained-- > 0 ? OK : INVALID; }
R cuCtxPushCurrent_v2(void *context)
{
    if (context != &the_context) return INVALID;
    depth++;
    return OK;
}
R cuCtxPopCurrent_v2(void **context)
{
    *context = &the_context;
    return depth-- > 0 ? OK : NO_CONTEXT;
}
R cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    uintptr_t start = (uintptr_t)at;
    const char *limit = getenv("STUB_LIMIT");
    if (!depth) return NO_CONTEXT;
    if (flags != PORTABLE || !bytes) return INVALID;
    if (limit && stub_registered() + bytes > strtoull(limit, NULL, 10)) return NO_MEMORY;
    for (int i = 0; i < SLOTS; i++)
        if (ranges[i].bytes && start < ranges[i].at + ranges[i].bytes && ranges[i].at < start + bytes)
            return TWICE;
    for (int i = 0; i < SLOTS; i++)
        if (!ranges[i].bytes) {
            ranges[i].at = start;
            ranges[i].bytes = bytes;
            return OK;
        }
    return NO_MEMORY;
}
R cuMemHostUnregister(void *at)
{
    if (!depth) return NO_CONTEXT;
    for (int i = 0; i < SLOTS; i++)
        if (ranges[i].bytes && ranges[i].at == (uintptr_t)at) {
            ranges[i].bytes = 0;
            return OK;
        }
    return UNKNOWN;
}
R cuMemAlloc_v2(uint64_t *at, size_t bytes)
{
    *at = (uint64_t)(uintptr_t)malloc(bytes);
    return depth ? OK : NO_CONTEXT;
}
R cuMemFree_v2(uint64_t at) { free((void *)(uintptr_t)at); return OK; }

static R copy(void *to, const void *from, const void *main_memory, size_t bytes)
{
    uintptr_t start = (uintptr_t)main_memory, end = start + bytes;
    size_t inside = 0;
    int touched = 0;
    for (int i = 0; i < SLOTS; i++) {
        uintptr_t low = ranges[i].at, high = low + ranges[i].bytes;
        if (ranges[i].bytes && low < end && start < high) {
            inside += (high < end ? high : end) - (low > start ? low : start);
            touched++;
        }
    }
    if (!depth) return NO_CONTEXT;
    if (touched && inside < bytes) return INVALID;
    if (touched > 1 && getenv("STUB_NO_SPAN")) return INVALID;
    if (to) memcpy(to, from, bytes);
    return OK;
}
typedef struct {
    struct { size_t x, y; int type; char *host; uint64_t device; void *array; size_t pitch; } from, to;
    size_t width, rows;
} Rows;
R cuMemcpy2D_v2(const Rows *rows)
{
    int in = rows->from.type == 1 && rows->to.type == 2;
    if (!in && (rows->from.type != 2 || rows->to.type != 1)) return INVALID;
    const char *from = in ? rows->from.host : (char *)(uintptr_t)rows->from.device;
    char *to = in ? (char *)(uintptr_t)rows->to.device : rows->to.host;
    const char *start = in ? from : to;
    size_t pitch = in ? rows->from.pitch : rows->to.pitch;
    if (rows->from.pitch < rows->width || rows->to.pitch < rows->width) return INVALID;
    if (copy(NULL, NULL, start, pitch * (rows->rows - 1) + rows->width) != OK) return INVALID;
    for (size_t row = 0; row < rows->rows; row++)
        memcpy(to + row * rows->to.pitch, from + row * rows->from.pitch, rows->width);
    return OK;
}
R cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) { return copy((void *)(uintptr_t)to, from, from, n); }
R cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { return copy(to, (void *)(uintptr_t)from, to, n); }
