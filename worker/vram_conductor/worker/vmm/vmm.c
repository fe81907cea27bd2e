/* Device memory that sleeps: preloaded into a cuda worker (LD_PRELOAD), it answers cudaMalloc and
 * cudaFree. Inside a tagged region of the calling thread, cudaMalloc reserves an address range and
 * backs it with physical memory of its own (the driver's virtual memory management). All memory of
 * a tag can then be given back to the device (sleep) and taken again at the same addresses (wake),
 * and who holds pointers into it never notices. Outside regions, and for pointers that are not
 * ours, the runtime's own functions run.
 *
 * Needs no CUDA headers: the few types of the driver interface that are used are declared in
 * driver.h. About locks see tag.h.
 *
 * Nothing here exits the process or prints. Every function undoes what it has begun when a step
 * fails; what the driver refuses to undo stays noted in the block and is tried again by the next
 * call. */
#include "vmm.h"

#include <stdlib.h>

#include "host.h"
#include "tag.h"

#define ABI 4

typedef struct { uint64_t bytes, mapped_bytes, backup_bytes, allocations, map_ns, copy_ns; } Stat;

static _Thread_local uint64_t now; /* the region's tag, 0 outside */

/* --- cudaMalloc and cudaFree ---------------------------------------------------------------- */

static CUresult tagged_malloc(void **pointer, size_t bytes)
{
    CUcontext context = NULL;
    CUdevice device;
    CUresult r = runtime_free(NULL); /* makes the runtime's context this thread's */
    if (r == SUCCESS) r = cu.cuCtxGetCurrent(&context);
    if (r == SUCCESS) r = cu.cuCtxGetDevice(&device);
    if (r != SUCCESS) return r;
    Block *b = calloc(1, sizeof *b);
    Tag *tag = b ? tag_take(now, true) : NULL;
    if (!tag) {
        free(b);
        return OUT_OF_MEMORY;
    }
    *b = (Block){.asked = bytes, .device = device};
    if (!tag->blocks) tag->context = context;
    r = tag->context == context ? block_reserve(b) : INVALID_VALUE; /* a tag has one device */
    if (r == SUCCESS && (r = block_map(b, NULL)) != SUCCESS)
        cu.cuMemAddressFree(b->address, b->bytes);
    if (r == SUCCESS) {
        *pointer = (void *)(uintptr_t)b->address;
        tag_add(tag, b);
    } else
        free(b);
    tag_give(tag);
    return r;
}

API CUresult cudaMalloc(void **pointer, size_t bytes)
{
    bool tagged = now && driver_opened && bytes && pointer;
    if (tagged && now == ON_HOST) return host_malloc(pointer, bytes);
    return tagged ? tagged_malloc(pointer, bytes) : runtime_malloc(pointer, bytes);
}

/* Asleep or awake. Step by step, so that what failed half-way can be freed again.
 *
 * Whoever frees has waited for all work that uses the memory, by its own streams. Waiting for the
 * whole context here would be an error while another thread records a CUDA graph, for both: this
 * call would be refused, and the recording spoilt (the CUDA programming guide, "Prohibited and
 * unhandled operations" of stream capture). llama.cpp ends the process on either. */
static CUresult free_block(Tag *tag, Block *b)
{
    CUresult r = b->mapped ? block_unmap(b, NULL) : SUCCESS;
    if (r == SUCCESS) r = backup_drop(b, NULL);
    if (r == SUCCESS && tag->blocks == b && !b->next) r = stream_drop(tag);
    if (r == SUCCESS) r = cu.cuMemAddressFree(b->address, b->bytes);
    if (r != SUCCESS) return r;
    tag_remove(tag, b);
    free(b);
    return SUCCESS;
}

API CUresult cudaFree(void *pointer)
{
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)pointer;
    Tag *tag = pointer && driver_opened ? tag_take_owner(address) : NULL;
    bool pushed;
    CUresult loan;
    if (!tag && pointer && driver_opened && host_free(pointer, &loan)) return loan;
    if (!tag) return runtime_free(pointer);
    Block *b = tag->blocks;
    while (b && b->address != address) b = b->next;
    /* None, where two threads free it at once. */
    CUresult r = b ? tag_enter(tag, &pushed, NULL) : INVALID_VALUE;
    if (r == SUCCESS) {
        r = free_block(tag, b);
        tag_leave(pushed);
    }
    tag_give(tag);
    return r;
}

/* --- for Python ----------------------------------------------------------------------------- */

API int vmm_abi(void) { return ABI; }

API uint64_t vmm_begin(uint64_t tag)
{
    uint64_t before = now;
    now = tag;
    return before;
}

API void vmm_end(uint64_t before) { now = before; }

/* Find the driver. Before it succeeds regions do nothing. */
API int vmm_open(Failure *why) { return driver_open(why); }

/* How wakes share the way to the device, see backup_pace(). Any thread; counts from the next block. */
API void vmm_pace(uint64_t piece_bytes, uint64_t give_ns) { backup_pace(piece_bytes, give_ns); }

enum move { BACK_UP, DROP, SLEEP, SLEEP_KEEPING, WAKE };

static int move(uint64_t id, enum move what, Failure *why)
{
    Tag *tag = tag_take(id, false);
    bool pushed;
    int code = OK;
    if (!tag) return OK; /* it has nothing, and nothing is to be done */
    if (tag->blocks && tag_enter(tag, &pushed, why) != SUCCESS)
        code = REFUSED;
    else if (tag->blocks) {
        if (what == BACK_UP) code = backup_make(tag, why);
        if (what == WAKE) code = tag_wake(tag, why);
        if (what == SLEEP || what == SLEEP_KEEPING)
            code = tag_sleep(tag, what == SLEEP_KEEPING, why);
        for (Block *b = tag->blocks; what == DROP && b && !code; b = b->next)
            if (backup_drop(b, why) != SUCCESS) code = REFUSED;
        tag_leave(pushed);
    }
    tag_give(tag);
    return code;
}

API int vmm_back_up(uint64_t tag, Failure *why) { return move(tag, BACK_UP, why); }
API int vmm_drop_backup(uint64_t tag, Failure *why) { return move(tag, DROP, why); }
API int vmm_wake(uint64_t tag, Failure *why) { return move(tag, WAKE, why); }
API int vmm_sleep(uint64_t tag, int keep, Failure *why)
{
    return move(tag, keep ? SLEEP_KEEPING : SLEEP, why);
}

API int vmm_stat(uint64_t id, Stat *stat)
{
    Tag *tag = tag_take(id, false);
    *stat = (Stat){0};
    if (!tag) return OK;
    for (Block *b = tag->blocks; b; b = b->next) {
        stat->allocations++;
        stat->bytes += b->bytes;
        if (b->mapped) stat->mapped_bytes += b->bytes;
        stat->backup_bytes += backup_bytes(b);
    }
    stat->map_ns = tag->wake_map_ns;
    stat->copy_ns = tag->wake_copy_ns;
    tag_give(tag);
    return OK;
}

API int vmm_free_bytes(uint64_t *bytes, Failure *why)
{
    size_t free_bytes = 0, total = 0;
    if (!driver_opened) return say(why, REFUSED, "the library was not opened");
    /* Makes a context where there is none. */
    CUresult r = check(why, "cudaFree", runtime_free(NULL));
    if (r == SUCCESS) r = TRY(why, cuMemGetInfo, &free_bytes, &total);
    *bytes = free_bytes;
    return r == SUCCESS ? OK : REFUSED;
}
