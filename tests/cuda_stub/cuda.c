/* A stand-in for libcuda.so.1: as much of the driver as the preload library uses, on main memory.
 *
 * It is as unkind as a GPU: an address without memory faults, new memory holds garbage, memory has
 * a cap, asynchronous copies happen when their stream is waited for and not before, and calls that
 * need a context fail without one. It counts everything that can leak, and stub_arm() lets the
 * nth call from now fail, of one function or of any. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int R;
typedef unsigned long long Address, Handle;

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, LAUNCH_FAILED = 719,
       STREAM_CAPTURE_UNSUPPORTED = 900 };
enum { UNIT = 64 << 10, SLOTS = 4096 };

typedef struct { int fd, released, mappings; size_t bytes; } Memory;
typedef struct { Address at; size_t bytes; Memory *memory; int readable; } Range;
typedef struct Copy {
    struct Copy *next;
    void *to;
    const void *from;
    size_t bytes;
    int in; /* to the device */
} Copy;
typedef struct { Copy *first, **last; } Stream;

struct counts {
    uint64_t calls, ranges, memories, used_bytes, host_blocks, host_bytes, streams, pushed;
    uint64_t in_bytes, out_bytes, synchronised;
    uint64_t ahead_bytes; /* the most that was on its way in at once */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct counts now;
static Range ranges[SLOTS];
static Stream *streams[SLOTS];
static uint64_t ahead_bytes;
static struct { void *at; size_t bytes; } host[SLOTS];
static size_t cap = (size_t)64 << 20, host_cap = (size_t)256 << 20;
static char armed[64];
static int countdown, code, pause_us;
static _Thread_local void *contexts[16];
static _Thread_local int depth;
static int able = 1, devices = 1;
static int recording, spoilt;
static char the_context;

/* --- for tests ------------------------------------------------------------------------------- */

void stub_counts(struct counts *out)
{
    pthread_mutex_lock(&lock);
    *out = now;
    out->pushed = (uint64_t)depth;
    pthread_mutex_unlock(&lock);
}

/* The nth call from now of `name` ("" for any) fails with `result`; 0 disarms. */
void stub_arm(const char *name, int nth, int result)
{
    pthread_mutex_lock(&lock);
    strncpy(armed, name, sizeof armed - 1);
    countdown = nth;
    code = result;
    pthread_mutex_unlock(&lock);
}

void stub_caps(uint64_t device_bytes, uint64_t host_bytes)
{
    cap = device_bytes;
    host_cap = host_bytes;
}

/* Every call takes up to this long, so that threads meet. */
void stub_pause(int us) { pause_us = us; }

/* A stream records a graph from now on, until it is called with 0: then whether that went well. */
int stub_record(int begin)
{
    pthread_mutex_lock(&lock);
    int well = !spoilt;
    recording = begin;
    spoilt = 0;
    pthread_mutex_unlock(&lock);
    return well;
}

/* Memory of somebody else on the same device. */
int stub_hog(int64_t bytes)
{
    pthread_mutex_lock(&lock);
    now.used_bytes += (uint64_t)bytes;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* For the runtime: its context is this thread's. */
void stub_attach(void)
{
    if (!depth) contexts[depth++] = &the_context;
}

int stub_detach(void)
{
    int had = depth;
    depth = 0;
    return had;
}

__attribute__((constructor)) static void configure(void)
{
    if (getenv("STUB_UNABLE")) able = 0;
    if (getenv("STUB_NO_DEVICE")) devices = 0;
}

static int fails(const char *name)
{
    int hit;
    if (pause_us) usleep((useconds_t)(rand() % pause_us));
    pthread_mutex_lock(&lock);
    now.calls++;
    hit = countdown > 0 && (!armed[0] || !strcmp(armed, name)) && --countdown == 0;
    pthread_mutex_unlock(&lock);
    return hit ? code : 0;
}
#define CALL                                                                                       \
    do {                                                                                           \
        int failed = fails(__func__);                                                              \
        if (failed) return failed;                                                                 \
    } while (0)
#define CALL_IN_CONTEXT                                                                            \
    CALL;                                                                                          \
    if (!depth) return NO_CONTEXT

/* --- contexts --------------------------------------------------------------------------------- */

R cuInit(unsigned flags) { CALL; return flags ? INVALID : OK; }
R cuGetErrorName(R result, const char **name)
{
    *name = result == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_STUB";
    return OK;
}
R cuDeviceGetCount(int *count) { CALL; *count = devices; return OK; }
R cuDeviceGetAttribute(int *value, int attribute, int device)
{
    CALL;
    if (attribute != 102 || device >= devices) return INVALID;
    *value = able;
    return OK;
}
R cuCtxGetCurrent(void **context) { CALL; *context = depth ? contexts[depth - 1] : NULL; return OK; }
R cuCtxPushCurrent_v2(void *context)
{
    CALL;
    if (context != &the_context || depth == 16) return INVALID;
    contexts[depth++] = context;
    return OK;
}
R cuCtxPopCurrent_v2(void **context)
{
    CALL;
    if (!depth) return NO_CONTEXT;
    *context = contexts[--depth];
    return OK;
}
R cuCtxGetDevice(int *device) { CALL_IN_CONTEXT; *device = 0; return OK; }

/* --- memory ----------------------------------------------------------------------------------- */

typedef struct { int type, handles, where, id; void *win32; unsigned char flags[8]; } Properties;

static int sound(const Properties *p) { return p->type == 1 && !p->handles && p->where == 1 && !p->id; }

R cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CALL_IN_CONTEXT;
    pthread_mutex_lock(&lock);
    *free_bytes = cap > now.used_bytes ? cap - now.used_bytes : 0;
    *total = cap;
    pthread_mutex_unlock(&lock);
    return OK;
}
R cuMemGetAllocationGranularity(size_t *unit, const Properties *p, int option)
{
    CALL;
    *unit = UNIT;
    return sound(p) && !option ? OK : INVALID;
}

static Range *range_at(Address at)
{
    for (int i = 0; i < SLOTS; i++)
        if (ranges[i].bytes && ranges[i].at == at) return &ranges[i];
    return NULL;
}

R cuMemAddressReserve(Address *at, size_t bytes, size_t align, Address wish, unsigned long long flags)
{
    CALL;
    if (!bytes || bytes % UNIT || align || wish || flags) return INVALID;
    void *start = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NO_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (!ranges[i].bytes) {
            ranges[i] = (Range){.at = (Address)start, .bytes = bytes};
            break;
        }
    now.ranges++;
    pthread_mutex_unlock(&lock);
    *at = (Address)start;
    return OK;
}
R cuMemAddressFree(Address at, size_t bytes)
{
    CALL;
    R result = INVALID;
    pthread_mutex_lock(&lock);
    Range *range = range_at(at);
    if (range && range->bytes == bytes && !range->memory) {
        munmap((void *)at, bytes);
        range->bytes = 0;
        now.ranges--;
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static void maybe_gone(Memory *memory)
{
    if (!memory->released || memory->mappings) return;
    now.used_bytes -= memory->bytes;
    now.memories--;
    close(memory->fd);
    free(memory);
}

R cuMemCreate(Handle *handle, size_t bytes, const Properties *p, unsigned long long flags)
{
    CALL;
    if (!bytes || bytes % UNIT || !sound(p) || flags) return INVALID;
    pthread_mutex_lock(&lock);
    int fits = now.used_bytes + bytes <= cap;
    if (fits) {
        now.used_bytes += bytes;
        now.memories++;
    }
    pthread_mutex_unlock(&lock);
    if (!fits) return NO_MEMORY;
    Memory *memory = calloc(1, sizeof *memory);
    memory->bytes = bytes;
    memory->fd = memfd_create("device", MFD_CLOEXEC);
    if (ftruncate(memory->fd, (off_t)bytes)) abort();
    void *at = mmap(NULL, bytes, PROT_WRITE, MAP_SHARED, memory->fd, 0);
    memset(at, 0xA5, bytes); /* what was there before is not told */
    munmap(at, bytes);
    *handle = (Handle)(uintptr_t)memory;
    return OK;
}
R cuMemRelease(Handle handle)
{
    CALL;
    Memory *memory = (Memory *)(uintptr_t)handle;
    pthread_mutex_lock(&lock);
    R result = memory->released ? INVALID : OK;
    memory->released = 1;
    if (result == OK) maybe_gone(memory);
    pthread_mutex_unlock(&lock);
    return result;
}
R cuMemMap(Address at, size_t bytes, size_t offset, Handle handle, unsigned long long flags)
{
    CALL;
    Memory *memory = (Memory *)(uintptr_t)handle;
    R result = INVALID;
    pthread_mutex_lock(&lock);
    Range *range = range_at(at);
    if (range && range->bytes == bytes && !range->memory && memory->bytes == bytes && !offset &&
        !flags && !memory->released) {
        mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
        range->memory = memory;
        range->readable = 0;
        memory->mappings++;
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
R cuMemSetAccess(Address at, size_t bytes, const int *access, size_t count)
{
    CALL;
    R result = INVALID;
    pthread_mutex_lock(&lock);
    Range *range = range_at(at);
    if (range && range->memory && range->bytes == bytes && count == 1 && access[0] == 1 &&
        access[1] == 0 && access[2] == 3) {
        mprotect((void *)at, bytes, PROT_READ | PROT_WRITE);
        range->readable = 1;
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
R cuMemUnmap(Address at, size_t bytes)
{
    CALL;
    R result = INVALID;
    pthread_mutex_lock(&lock);
    Range *range = range_at(at);
    if (range && range->memory && range->bytes == bytes) {
        mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0);
        range->memory->mappings--;
        maybe_gone(range->memory);
        range->memory = NULL;
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

R cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
    CALL_IN_CONTEXT;
    R result = NO_MEMORY;
    if (!bytes || flags) return INVALID;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS && now.host_bytes + bytes <= host_cap; i++)
        if (!host[i].at) {
            *at = host[i].at = malloc(bytes);
            host[i].bytes = bytes;
            now.host_blocks++;
            now.host_bytes += bytes;
            result = OK;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}
R cuMemFreeHost(void *at)
{
    CALL_IN_CONTEXT;
    R result = INVALID;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        for (Copy *copy = streams[i] ? streams[i]->first : NULL; copy; copy = copy->next)
            if (copy->to == at || copy->from == at) abort(); /* a copy is under way */
    for (int i = 0; i < SLOTS; i++)
        if (at && host[i].at == at) {
            memset(at, 0x5A, host[i].bytes);
            free(at);
            host[i].at = NULL;
            now.host_blocks--;
            now.host_bytes -= host[i].bytes;
            result = OK;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- streams ---------------------------------------------------------------------------------- */

static void finish(Stream *stream)
{
    pthread_mutex_lock(&lock);
    for (Copy *copy = stream->first, *next; copy; copy = next) {
        if (copy->from) memcpy(copy->to, copy->from, copy->bytes);
        else memset(copy->to, 0, copy->bytes);
        if (copy->in) ahead_bytes -= copy->bytes;
        next = copy->next;
        free(copy);
    }
    stream->first = NULL;
    stream->last = &stream->first;
    pthread_mutex_unlock(&lock);
}

R cuStreamCreate(void **stream, unsigned flags)
{
    CALL_IN_CONTEXT;
    if (flags != 1) return INVALID; /* anything else would wait for everybody's work */
    Stream *made = calloc(1, sizeof *made);
    made->last = &made->first;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (!streams[i]) {
            streams[i] = made;
            break;
        }
    now.streams++;
    pthread_mutex_unlock(&lock);
    *stream = made;
    return OK;
}
R cuStreamSynchronize(void *stream)
{
    int failed = fails(__func__);
    finish(stream); /* one that fails does not undo what was done */
    return failed;
}
R cuStreamDestroy_v2(void *stream)
{
    CALL_IN_CONTEXT;
    Stream *gone = stream;
    if (gone->first) abort(); /* nobody has waited for its copies */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (streams[i] == gone) streams[i] = NULL;
    now.streams--;
    pthread_mutex_unlock(&lock);
    free(gone);
    return OK;
}
/* An event is the stream that it was recorded on: who waits for it waits for all of that. Events
 * are counted as streams. */
R cuEventCreate(void **event, unsigned flags)
{
    CALL_IN_CONTEXT;
    if (flags != 2) return INVALID; /* timing makes them slow */
    pthread_mutex_lock(&lock);
    now.streams++;
    pthread_mutex_unlock(&lock);
    *event = calloc(1, sizeof(Stream *));
    return OK;
}
R cuEventRecord(void *event, void *stream)
{
    CALL_IN_CONTEXT;
    *(Stream **)event = stream;
    return OK;
}
R cuEventSynchronize(void *event)
{
    int failed = fails(__func__);
    if (*(Stream **)event) finish(*(Stream **)event);
    return failed;
}
R cuEventDestroy_v2(void *event)
{
    CALL_IN_CONTEXT;
    pthread_mutex_lock(&lock);
    now.streams--;
    pthread_mutex_unlock(&lock);
    free(event);
    return OK;
}
R cuCtxSynchronize(void)
{
    CALL_IN_CONTEXT;
    pthread_mutex_lock(&lock);
    now.synchronised++;
    int refused = spoilt = recording;
    pthread_mutex_unlock(&lock);
    return refused ? STREAM_CAPTURE_UNSUPPORTED : OK;
}

static R queue(Stream *stream, void *to, const void *from, size_t bytes, uint64_t *count)
{
    Copy *copy = calloc(1, sizeof *copy);
    *copy = (Copy){.to = to, .from = from, .bytes = bytes, .in = count == &now.in_bytes};
    pthread_mutex_lock(&lock);
    *stream->last = copy;
    stream->last = &copy->next;
    *count += bytes;
    if (copy->in) ahead_bytes += bytes;
    if (ahead_bytes > now.ahead_bytes) now.ahead_bytes = ahead_bytes;
    pthread_mutex_unlock(&lock);
    return OK;
}
R cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream)
{
    CALL_IN_CONTEXT;
    return queue(stream, (void *)to, from, bytes, &now.in_bytes);
}
R cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *stream)
{
    uint64_t nothing = 0;
    CALL_IN_CONTEXT;
    return value ? INVALID : queue(stream, (void *)to, NULL, bytes, &nothing);
}
R cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream)
{
    CALL_IN_CONTEXT;
    return queue(stream, to, (const void *)from, bytes, &now.out_bytes);
}
