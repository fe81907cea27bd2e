/* Device memory that sleeps: preloaded into a cuda worker (LD_PRELOAD), it answers cudaMalloc and
 * cudaFree. Inside a tagged region of the calling thread, cudaMalloc reserves an address range and
 * backs it with physical memory of its own (the driver's virtual memory management). All memory of
 * a tag can then be given back to the device (sleep) and taken again at the same addresses (wake),
 * and who holds pointers into it never notices. Outside regions, and for pointers that are not
 * ours, the runtime's own functions run.
 *
 * Needs no CUDA headers: the few types of the driver interface that are used are declared here.
 *
 * Locks. `registry` protects the list of tags and every tag's list of blocks; it is held for list
 * walks only. A tag's own lock is held while its blocks change, however long that takes, so that a
 * move of one tag stops nobody but its own users. Order: a tag's lock, then `registry`. A list of
 * blocks is changed with both and may be read with either.
 *
 * Nothing here exits the process or prints. Every function undoes what it has begun when a step
 * fails; what the driver refuses to undo stays noted in the block and is tried again by the next
 * call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vmm.h"

#define ABI 2
#ifndef CHUNK
#define CHUNK ((size_t)64 << 20) /* pinning holds the driver's locks: in pieces others get a turn */
#endif
#ifndef PIECE
#define PIECE ((size_t)4 << 20) /* copied in at a time: small copies of others wait for so much */
#endif

/* --- the driver interface (cuda.h), as far as it is used ------------------------------------- */

typedef int CUresult, CUdevice;
typedef void *CUcontext, *CUstream;
typedef unsigned long long CUdeviceptr, CUhandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int type, requested_handle_types;
    CUmemLocation location;
    void *win32_meta_data;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char rest[4]; } flags;
} CUmemAllocationProp;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, UNKNOWN = 999 };
enum { VMM_SUPPORTED = 102, PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, NON_BLOCKING = 1 };

#define DRIVER(X)                                                                                  \
    X(cuInit, "cuInit", (unsigned))                                                                \
    X(cuGetErrorName, "cuGetErrorName", (CUresult, const char **))                                 \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *))                                               \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, CUdevice))                        \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext *))                                           \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                        \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext *))                                        \
    X(cuCtxGetDevice, "cuCtxGetDevice", (CUdevice *))                                              \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                       \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                              \
      (size_t *, const CUmemAllocationProp *, int))                                                \
    X(cuMemAddressReserve, "cuMemAddressReserve",                                                  \
      (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                            \
    X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, size_t))                                 \
    X(cuMemCreate, "cuMemCreate",                                                                  \
      (CUhandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    X(cuMemRelease, "cuMemRelease", (CUhandle))                                                    \
    X(cuMemMap, "cuMemMap", (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))           \
    X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, size_t))                                             \
    X(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))    \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                               \
    X(cuMemFreeHost, "cuMemFreeHost", (void *))                                                    \
    X(cuStreamCreate, "cuStreamCreate", (CUstream *, unsigned))                                    \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream))                                      \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                           \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))    \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))         \
    X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))

static struct {
#define X(name, symbol, arguments) CUresult(*name) arguments;
    DRIVER(X)
#undef X
} cu;

/* --- state ----------------------------------------------------------------------------------- */

typedef struct Block { /* one cudaMalloc */
    struct Block *next;
    CUdeviceptr address;
    size_t asked, bytes; /* asked for; rounded up to the driver's granularity */
    CUdevice device;
    bool mapped;    /* backed by device memory now */
    bool kept;      /* asleep: its contents are in the backup, and wanted */
    bool backed_up; /* the chunks hold its contents */
    bool fresh;     /* changed by the call that is under way */
    size_t chunks;
    void **chunk; /* pinned host memory, CHUNK bytes each but the last */
} Block;

typedef struct Tag {
    struct Tag *next;
    uint64_t id;
    int users; /* calls that have it in hand, under `registry` */
    pthread_mutex_t lock;
    CUcontext context;
    CUstream stream, second; /* of its copies; made at the first */
    Block *blocks;
    uint64_t wake_map_ns, wake_copy_ns;
} Tag;

typedef struct { uint64_t bytes, mapped_bytes, backup_bytes, allocations, map_ns, copy_ns; } Stat;
typedef struct { uint64_t need_bytes, free_bytes; char text[256]; } Failure;

enum { OK, NO_MEMORY, REFUSED, LOST, BACKUP = 16 }; /* what the functions for Python return */

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static Tag *tags;
static _Atomic bool opened; /* the driver's functions are there */
static _Thread_local uint64_t now; /* the region's tag, 0 outside */

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Note the first refusal of the driver. */
static CUresult check(Failure *why, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result != SUCCESS && why && !why->text[0]) {
        if (cu.cuGetErrorName(result, &name) != SUCCESS || !name) name = "an unknown error";
        snprintf(why->text, sizeof why->text, "%s says %s (%d)", what, name, result);
    }
    return result;
}
#define TRY(why, name, ...) check(why, #name, cu.name(__VA_ARGS__))

static int say(Failure *why, int code, const char *text)
{
    if (why && !why->text[0]) snprintf(why->text, sizeof why->text, "%s", text);
    return code;
}

/* --- the runtime's own functions -------------------------------------------------------------- */

static int find_runtime(struct dl_phdr_info *info, size_t size, void *found)
{
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *base = slash ? slash + 1 : info->dlpi_name;
    (void)size;
    if (strncmp(base, "libcudart.so", 12)) return 0;
    *(char **)found = strdup(info->dlpi_name);
    return 1;
}

/* Behind us in the search order, or, where libcudart was loaded locally, in that library. */
void *vmm_real(const char *name)
{
    void *function = dlsym(RTLD_NEXT, name);
    char *path = NULL;
    if (!function && dl_iterate_phdr(find_runtime, &path) && path) {
        void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
        if (library) {
            function = dlsym(library, name);
            dlclose(library); /* one reference less; who loaded it keeps it */
        }
        free(path);
    }
    return function;
}

static CUresult real_malloc(void **pointer, size_t bytes)
{
    static CUresult (*_Atomic function)(void **, size_t); /* two threads store the same */
    if (!function) function = (CUresult(*)(void **, size_t))vmm_real("cudaMalloc");
    return function ? function(pointer, bytes) : NOT_INITIALIZED;
}

static CUresult real_free(void *pointer)
{
    static CUresult (*_Atomic function)(void *);
    if (!function) function = (CUresult(*)(void *))vmm_real("cudaFree");
    return function ? function(pointer) : NOT_INITIALIZED;
}

/* --- tags ------------------------------------------------------------------------------------- */

/* The tag, locked; NULL if there is none and none is to be made, or no memory for one. */
static Tag *take(uint64_t id, bool make)
{
    Tag *tag;
    pthread_mutex_lock(&registry);
    for (tag = tags; tag && tag->id != id; tag = tag->next) { }
    if (!tag && make && (tag = calloc(1, sizeof *tag))) {
        tag->id = id;
        pthread_mutex_init(&tag->lock, NULL);
        tag->next = tags;
        tags = tag;
    }
    if (tag) tag->users++;
    pthread_mutex_unlock(&registry);
    if (tag) pthread_mutex_lock(&tag->lock);
    return tag;
}

/* The tag of the block that begins at `address`, locked; NULL if it is not ours. */
static Tag *take_owner(CUdeviceptr address)
{
    uint64_t id = 0;
    pthread_mutex_lock(&registry);
    for (Tag *tag = tags; tag && !id; tag = tag->next)
        for (Block *b = tag->blocks; b; b = b->next)
            if (b->address == address) id = tag->id;
    pthread_mutex_unlock(&registry);
    return id ? take(id, false) : NULL;
}

/* Undo take(); a tag without blocks that nobody else has in hand goes. */
static void give(Tag *tag)
{
    pthread_mutex_unlock(&tag->lock);
    pthread_mutex_lock(&registry);
    if (--tag->users == 0 && !tag->blocks) {
        Tag **link = &tags;
        while (*link != tag) link = &(*link)->next;
        *link = tag->next;
        pthread_mutex_destroy(&tag->lock);
        free(tag);
    }
    pthread_mutex_unlock(&registry);
}

/* Work in the tag's context, whatever the thread's is. Undone by leave(). */
static CUresult enter(Tag *tag, bool *pushed, Failure *why)
{
    CUcontext current = NULL;
    CUresult r = TRY(why, cuCtxGetCurrent, &current);
    *pushed = false;
    if (r == SUCCESS && current != tag->context) {
        r = TRY(why, cuCtxPushCurrent, tag->context);
        *pushed = r == SUCCESS;
    }
    return r;
}

/* A pop that fails leaves the thread in a context of the same device: nothing depends on it. */
static void leave(bool pushed)
{
    CUcontext ignored;
    if (pushed) cu.cuCtxPopCurrent(&ignored);
}

/* --- blocks ----------------------------------------------------------------------------------- */

static CUmemAllocationProp properties(CUdevice device)
{
    CUmemAllocationProp p;
    memset(&p, 0, sizeof p);
    p.type = PINNED;
    p.location.type = ON_DEVICE;
    p.location.id = device;
    return p;
}

static CUresult unmap(Block *b, Failure *why)
{
    CUresult r = TRY(why, cuMemUnmap, b->address, b->bytes);
    if (r == SUCCESS) b->mapped = false;
    return r;
}

/* Physical memory for the block. The mapping keeps it alive, so that the handle is released at
 * once and an unmap gives everything back. */
static CUresult map(Block *b, Failure *why)
{
    CUmemAllocationProp memory = properties(b->device);
    CUmemAccessDesc access = {memory.location, READ_WRITE};
    CUhandle handle;
    CUresult r = TRY(why, cuMemCreate, &handle, b->bytes, &memory, 0);
    if (r != SUCCESS) return r;
    r = TRY(why, cuMemMap, b->address, b->bytes, 0, handle, 0);
    b->mapped = r == SUCCESS;
    CUresult released = TRY(why, cuMemRelease, handle);
    if (r == SUCCESS) r = released;
    if (r == SUCCESS) r = TRY(why, cuMemSetAccess, b->address, b->bytes, &access, 1);
    if (r != SUCCESS && b->mapped) unmap(b, why);
    if (released != SUCCESS) cu.cuMemRelease(handle); /* or its memory is lost for good */
    return r;
}

static size_t chunk_bytes(const Block *b, size_t i)
{
    size_t left = b->asked - i * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

static CUresult drop(Block *b, Failure *why)
{
    b->backed_up = false;
    while (b->chunks) {
        CUresult r = TRY(why, cuMemFreeHost, b->chunk[b->chunks - 1]);
        if (r != SUCCESS) return r;
        b->chunks--;
    }
    free(b->chunk);
    b->chunk = NULL;
    return SUCCESS;
}

static CUresult need_streams(Tag *tag, Failure *why)
{
    CUresult r = SUCCESS;
    if (!tag->stream) r = TRY(why, cuStreamCreate, &tag->stream, NON_BLOCKING);
    if (r == SUCCESS && !tag->second) r = TRY(why, cuStreamCreate, &tag->second, NON_BLOCKING);
    return r;
}

/* Also after a failure: copies may be under way. */
static CUresult finish_streams(Tag *tag, Failure *why, CUresult before)
{
    CUresult first = SUCCESS, second = SUCCESS;
    if (tag->stream) first = TRY(why, cuStreamSynchronize, tag->stream);
    if (tag->second) second = TRY(why, cuStreamSynchronize, tag->second);
    return before != SUCCESS ? before : first != SUCCESS ? first : second;
}

static CUresult drop_stream(CUstream *stream)
{
    CUresult r = *stream ? cu.cuStreamDestroy(*stream) : SUCCESS;
    if (r == SUCCESS) *stream = NULL;
    return r;
}

/* Pinned memory for the block, and the copies into it under way. */
static CUresult copy_out(Tag *tag, Block *b, Failure *why)
{
    CUresult r = drop(b, why); /* what an earlier drop could not give back */
    if (r != SUCCESS) return r;
    size_t wanted = (b->asked + CHUNK - 1) / CHUNK;
    if (!(b->chunk = calloc(wanted, sizeof *b->chunk))) return OUT_OF_MEMORY;
    for (size_t i = 0; i < wanted && r == SUCCESS; i++) {
        r = TRY(why, cuMemHostAlloc, &b->chunk[i], chunk_bytes(b, i), 0);
        if (r != SUCCESS) break;
        b->chunks++;
        r = TRY(why, cuMemcpyDtoHAsync, b->chunk[i], b->address + i * CHUNK, chunk_bytes(b, i),
                tag->stream);
    }
    return r;
}

/* Two pieces are under way at any time, on two streams: the bus is never idle, and what others copy
 * meanwhile (KV that comes back, the inputs of a decode) gets its turn after a piece or two. All
 * of it queued at once would be in front of them, for milliseconds. */
static CUresult copy_in(Tag *tag, Block *b, Failure *why)
{
    CUresult r = SUCCESS;
    size_t turn = 0;
    for (size_t i = 0; i < b->chunks; i++)
        for (size_t at = 0; at < chunk_bytes(b, i) && r == SUCCESS; at += PIECE) {
            size_t left = chunk_bytes(b, i) - at;
            CUstream stream = turn++ % 2 ? tag->second : tag->stream;
            r = TRY(why, cuStreamSynchronize, stream); /* of its last piece */
            if (r == SUCCESS)
                r = TRY(why, cuMemcpyHtoDAsync, b->address + i * CHUNK + at,
                        (const char *)b->chunk[i] + at, left < PIECE ? left : PIECE, stream);
        }
    return r;
}

/* --- moves of a whole tag, which is locked and whose context is current ------------------------ */

static int back_up(Tag *tag, Failure *why)
{
    uint64_t need = 0;
    CUresult r = SUCCESS;
    for (Block *b = tag->blocks; b; b = b->next) {
        b->fresh = false;
        if (b->backed_up) continue;
        if (!b->mapped) return say(why, LOST, "it sleeps, and its contents are gone");
        need += b->asked;
    }
    if (!need) return OK;
    r = need_streams(tag, why);
    for (Block *b = tag->blocks; b && r == SUCCESS; b = b->next)
        if (!b->backed_up) {
            b->fresh = true;
            r = copy_out(tag, b, why);
        }
    r = finish_streams(tag, why, r);
    for (Block *b = tag->blocks; b; b = b->next) {
        if (b->fresh && r == SUCCESS) b->backed_up = true;
        if (b->fresh && r != SUCCESS) drop(b, why);
    }
    if (r == SUCCESS) return OK;
    if (why) why->need_bytes = need;
    return say(why, REFUSED, "no host memory");
}

/* Every sleeping block gets memory; copies begin as soon as a block is mapped. What has no contents
 * to come back is cleared: garbage can be anything, also a number that spreads. */
static CUresult wake_blocks(Tag *tag, Failure *why, uint64_t *map_ns)
{
    CUresult r = SUCCESS;
    for (Block *b = tag->blocks; b && r == SUCCESS; b = b->next) {
        if (b->mapped) continue;
        uint64_t begun = clock_ns();
        r = map(b, why);
        *map_ns += clock_ns() - begun;
        b->fresh = b->mapped;
        if (r == SUCCESS) r = need_streams(tag, why);
        if (r == SUCCESS && b->kept) r = copy_in(tag, b, why);
        else if (r == SUCCESS) r = TRY(why, cuMemsetD8Async, b->address, 0, b->bytes, tag->stream);
    }
    return finish_streams(tag, why, r);
}

static int wake(Tag *tag, Failure *why)
{
    uint64_t need = 0, begun = clock_ns(), map_ns = 0;
    size_t free_bytes = 0, total = 0;
    for (Block *b = tag->blocks; b; b = b->next) {
        b->fresh = false;
        if (b->mapped) continue;
        if (b->kept && !b->backed_up) return say(why, LOST, "its backup was dropped");
        need += b->bytes;
    }
    if (!need) return OK;
    CUresult r = TRY(why, cuMemGetInfo, &free_bytes, &total);
    if (r != SUCCESS) return REFUSED;
    why->need_bytes = need;
    why->free_bytes = free_bytes;
    if (free_bytes < need) return say(why, NO_MEMORY, "too little free memory");
    r = wake_blocks(tag, why, &map_ns);
    for (Block *b = tag->blocks; b; b = b->next) {
        if (b->fresh && r != SUCCESS) unmap(b, why); /* fully asleep again */
        if (b->fresh && r == SUCCESS) b->kept = false;
    }
    if (r != SUCCESS) return r == OUT_OF_MEMORY ? NO_MEMORY : REFUSED;
    tag->wake_map_ns = map_ns;
    tag->wake_copy_ns = clock_ns() - begun - map_ns;
    return OK;
}

static int put_to_sleep(Tag *tag, bool keep, Failure *why)
{
    CUresult r = SUCCESS;
    Failure ignored = {0};
    bool awake = false;
    for (Block *b = tag->blocks; b; b = b->next) awake = awake || b->mapped;
    if (keep && awake) {
        int code = back_up(tag, why);
        if (code) return BACKUP + code;
    }
    for (Block *b = tag->blocks; b && r == SUCCESS; b = b->next) {
        if (!b->mapped) continue;
        r = unmap(b, why);
        if (r == SUCCESS) b->kept = keep;
    }
    if (r == SUCCESS) return OK;
    wake(tag, &ignored);
    return REFUSED;
}

/* --- cudaMalloc and cudaFree ------------------------------------------------------------------- */

static CUresult reserve(Block *b)
{
    CUmemAllocationProp memory = properties(b->device);
    size_t unit = 0;
    CUresult r = cu.cuMemGetAllocationGranularity(&unit, &memory, 0);
    if (r != SUCCESS) return r;
    if (!unit || b->asked > SIZE_MAX - unit) return OUT_OF_MEMORY;
    b->bytes = (b->asked + unit - 1) / unit * unit;
    return cu.cuMemAddressReserve(&b->address, b->bytes, 0, 0, 0);
}

static CUresult tagged_malloc(void **pointer, size_t bytes)
{
    CUcontext context = NULL;
    CUdevice device;
    CUresult r = real_free(NULL); /* makes the runtime's context this thread's */
    if (r == SUCCESS) r = cu.cuCtxGetCurrent(&context);
    if (r == SUCCESS) r = cu.cuCtxGetDevice(&device);
    if (r != SUCCESS) return r;
    Block *b = calloc(1, sizeof *b);
    Tag *tag = b ? take(now, true) : NULL;
    if (!tag) {
        free(b);
        return OUT_OF_MEMORY;
    }
    *b = (Block){.asked = bytes, .device = device};
    if (!tag->blocks) tag->context = context;
    r = tag->context == context ? reserve(b) : INVALID_VALUE; /* a tag has one device */
    if (r == SUCCESS && (r = map(b, NULL)) != SUCCESS)
        cu.cuMemAddressFree(b->address, b->bytes);
    if (r == SUCCESS) {
        *pointer = (void *)(uintptr_t)b->address;
        pthread_mutex_lock(&registry);
        b->next = tag->blocks;
        tag->blocks = b;
        pthread_mutex_unlock(&registry);
    } else
        free(b);
    give(tag);
    return r;
}

API CUresult cudaMalloc(void **pointer, size_t bytes)
{
    return now && opened && bytes && pointer ? tagged_malloc(pointer, bytes)
                                             : real_malloc(pointer, bytes);
}

/* Asleep or awake. Step by step, so that what failed half-way can be freed again. */
static CUresult free_block(Tag *tag, Block *b)
{
    CUresult r = SUCCESS;
    /* The runtime's cudaFree waits for the device, too: work that uses the memory may be queued. */
    if (b->mapped) r = cu.cuCtxSynchronize();
    if (r == SUCCESS && b->mapped) r = unmap(b, NULL);
    if (r == SUCCESS) r = drop(b, NULL);
    if (tag->blocks == b && !b->next) {
        if (r == SUCCESS) r = drop_stream(&tag->stream);
        if (r == SUCCESS) r = drop_stream(&tag->second);
    }
    if (r == SUCCESS) r = cu.cuMemAddressFree(b->address, b->bytes);
    if (r != SUCCESS) return r;
    Block **link = &tag->blocks;
    pthread_mutex_lock(&registry);
    while (*link != b) link = &(*link)->next;
    *link = b->next;
    pthread_mutex_unlock(&registry);
    free(b);
    return SUCCESS;
}

API CUresult cudaFree(void *pointer)
{
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)pointer;
    Tag *tag = pointer && opened ? take_owner(address) : NULL;
    bool pushed;
    if (!tag) return real_free(pointer);
    Block *b = tag->blocks;
    while (b && b->address != address) b = b->next;
    CUresult r = b ? enter(tag, &pushed, NULL) : INVALID_VALUE; /* freed by two threads at once */
    if (r == SUCCESS) {
        r = free_block(tag, b);
        leave(pushed);
    }
    give(tag);
    return r;
}

/* --- for Python -------------------------------------------------------------------------------- */

API int vmm_abi(void) { return ABI; }

API uint64_t vmm_begin(uint64_t tag)
{
    uint64_t before = now;
    now = tag;
    return before;
}

API void vmm_end(uint64_t before) { now = before; }

static int open_driver(Failure *why)
{
    const char *path = getenv("VRAM_CONDUCTOR_LIBCUDA");
    void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int count = 0, able = 0;
    if (!library) return say(why, REFUSED, "no NVIDIA driver here: libcuda.so.1 cannot be loaded");
#define X(name, symbol, arguments)                                                                 \
    if (!(cu.name = (CUresult(*) arguments)dlsym(library, symbol)))                                \
        return say(why, REFUSED, "the NVIDIA driver is too old: it has no " symbol);
    DRIVER(X)
#undef X
    if (TRY(why, cuInit, 0) || TRY(why, cuDeviceGetCount, &count)) return REFUSED;
    if (!count) return say(why, REFUSED, "the NVIDIA driver shows no GPU");
    for (CUdevice device = 0; device < count; device++) {
        if (TRY(why, cuDeviceGetAttribute, &able, VMM_SUPPORTED, device)) return REFUSED;
        if (!able) return say(why, REFUSED, "this GPU or its driver has no virtual memory management");
    }
    return OK;
}

/* Find the driver. Before it succeeds regions do nothing. */
API int vmm_open(Failure *why)
{
    pthread_mutex_lock(&opening);
    int code = opened ? OK : open_driver(why);
    opened = code == OK;
    pthread_mutex_unlock(&opening);
    return code;
}

enum move { BACK_UP, DROP, SLEEP, SLEEP_KEEPING, WAKE };

static int move(uint64_t id, enum move what, Failure *why)
{
    Tag *tag = take(id, false);
    bool pushed;
    int code = OK;
    if (!tag) return OK; /* it has nothing, and nothing is to be done */
    if (tag->blocks && enter(tag, &pushed, why) != SUCCESS)
        code = REFUSED;
    else if (tag->blocks) {
        if (what == BACK_UP) code = back_up(tag, why);
        if (what == WAKE) code = wake(tag, why);
        if (what == SLEEP || what == SLEEP_KEEPING)
            code = put_to_sleep(tag, what == SLEEP_KEEPING, why);
        for (Block *b = tag->blocks; what == DROP && b && !code; b = b->next)
            if (drop(b, why) != SUCCESS) code = REFUSED;
        leave(pushed);
    }
    give(tag);
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
    Tag *tag = take(id, false);
    *stat = (Stat){0};
    if (!tag) return OK;
    for (Block *b = tag->blocks; b; b = b->next) {
        stat->allocations++;
        stat->bytes += b->bytes;
        if (b->mapped) stat->mapped_bytes += b->bytes;
        for (size_t i = 0; i < b->chunks; i++) stat->backup_bytes += chunk_bytes(b, i);
    }
    stat->map_ns = tag->wake_map_ns;
    stat->copy_ns = tag->wake_copy_ns;
    give(tag);
    return OK;
}

API int vmm_free_bytes(uint64_t *bytes, Failure *why)
{
    size_t free_bytes = 0, total = 0;
    if (!opened) return say(why, REFUSED, "the library was not opened");
    CUresult r = check(why, "cudaFree", real_free(NULL)); /* makes a context where there is none */
    if (r == SUCCESS) r = TRY(why, cuMemGetInfo, &free_bytes, &total);
    *bytes = free_bytes;
    return r == SUCCESS ? OK : REFUSED;
}
