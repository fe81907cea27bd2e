/* Lets one call of the CUDA runtime or driver fail, in a process that is running.
 *
 * It is preloaded, and named as the driver to our own preload library (VRAM_CONDUCTOR_LIBCUDA):
 * calls of llama.cpp and of ours go through it alike. What is to fail is written by the test into
 * a file that is mapped here (FAULT_FILE): a name, how many calls from now, the error code.
 *
 * The name "free" is another matter: as long as it stands there, whatever gives device memory back
 * says that it has, and the device keeps it until the process ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct order {
    char name[32];
    int32_t countdown, code, fired, calls;
};

static struct order *order;

__attribute__((constructor)) static void map_order(void)
{
    const char *path = getenv("FAULT_FILE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *order, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    order = at == MAP_FAILED ? NULL : at;
}

static int fails(const char *name)
{
    if (!order || strncmp(order->name, name, sizeof order->name)) return 0;
    __atomic_add_fetch(&order->calls, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&order->countdown, __ATOMIC_SEQ_CST) <= 0) return 0;
    if (__atomic_sub_fetch(&order->countdown, 1, __ATOMIC_SEQ_CST) != 0) return 0;
    __atomic_add_fetch(&order->fired, 1, __ATOMIC_SEQ_CST);
    return order->code;
}

/* Counted like failures, although nobody is told. */
static int keeps(void)
{
    if (!order || strncmp(order->name, "free", sizeof order->name)) return 0;
    __atomic_add_fetch(&order->fired, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static void *next(const char *name, const char *library)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (found) return found;
    void *handle = dlopen(library, RTLD_LAZY);
    return handle ? dlsym(handle, name) : NULL;
}

static const char *driver(void)
{
    const char *path = getenv("FAULT_LIBCUDA");
    return path ? path : "libcuda.so.1";
}

static const char *runtime(void)
{
    const char *path = getenv("FAULT_LIBCUDART");
    return path ? path : "libcudart.so.13";
}

#define WRAP(library, name, arguments, values) WRAP_UNLESS(0, library, name, arguments, values)

#define WRAP_UNLESS(kept, library, name, arguments, values)                                        \
    int name arguments                                                                             \
    {                                                                                              \
        static int(*real) arguments;                                                               \
        int failed = fails(#name);                                                                 \
        if (failed) return failed;                                                                 \
        if (kept) return 0;                                                                        \
        if (!real) real = (int(*) arguments)next(#name, library);                                  \
        return real ? real values : 3;                                                             \
    }

WRAP(runtime(), cudaMalloc, (void **at, size_t bytes), (at, bytes))
WRAP(runtime(), cudaHostRegister, (void *at, size_t bytes, unsigned flags), (at, bytes, flags))
WRAP(driver(), cuMemCreate,
     (unsigned long long *handle, size_t bytes, const void *properties, unsigned long long flags),
     (handle, bytes, properties, flags))
WRAP(driver(), cuMemMap,
     (unsigned long long at, size_t bytes, size_t offset, unsigned long long handle,
      unsigned long long flags),
     (at, bytes, offset, handle, flags))
WRAP_UNLESS(keeps(), driver(), cuMemUnmap, (unsigned long long at, size_t bytes), (at, bytes))
WRAP_UNLESS(keeps(), driver(), cuMemAddressFree, (unsigned long long at, size_t bytes), (at, bytes))
/* Without a pointer it frees nothing: it makes the context. */
WRAP_UNLESS(at && keeps(), runtime(), cudaFree, (void *at), (at))
WRAP(driver(), cuMemHostAlloc, (void **at, size_t bytes, unsigned flags), (at, bytes, flags))
