/* Finds the driver's functions, and words what it refuses. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

struct Driver cu;
_Atomic bool driver_opened;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

CUresult check(Failure *why, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result != SUCCESS && why && !why->text[0]) {
        if (cu.cuGetErrorName(result, &name) != SUCCESS || !name) name = "an unknown error";
        snprintf(why->text, sizeof why->text, "%s says %s (%d)", what, name, result);
    }
    return result;
}

int say(Failure *why, int code, const char *text)
{
    if (why && !why->text[0]) snprintf(why->text, sizeof why->text, "%s", text);
    return code;
}

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
        if (!able)
            return say(why, REFUSED, "this GPU or its driver has no virtual memory management");
    }
    return OK;
}

int driver_open(Failure *why)
{
    pthread_mutex_lock(&opening);
    int code = driver_opened ? OK : open_driver(why);
    driver_opened = code == OK;
    pthread_mutex_unlock(&opening);
    return code;
}
