/* The driver interface (cuda.h), as far as it is used. */
#ifndef VMM_DRIVER_H
#define VMM_DRIVER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult, CUdevice;
typedef void *CUcontext, *CUstream, *CUevent;
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
enum { VMM_SUPPORTED = 102, PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, NON_BLOCKING = 1, NO_TIMING = 2 };

#define DRIVER(X)                                                                                  \
    X(cuInit, "cuInit", (unsigned))                                                                \
    X(cuGetErrorName, "cuGetErrorName", (CUresult, const char **))                                 \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *))                                               \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, CUdevice))                        \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext *))                                           \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                        \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext *))                                        \
    X(cuCtxGetDevice, "cuCtxGetDevice", (CUdevice *))                                              \
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
    X(cuEventCreate, "cuEventCreate", (CUevent *, unsigned))                                       \
    X(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                                         \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent))                                         \
    X(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                                              \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))    \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))         \
    X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))

/* The driver's functions, once it has been opened. */
extern struct Driver {
#define X(name, symbol, arguments) CUresult(*name) arguments;
    DRIVER(X)
#undef X
} cu;
extern _Atomic bool driver_opened;

typedef struct { uint64_t need_bytes, free_bytes; char text[256]; } Failure;

enum { OK, NO_MEMORY, REFUSED, LOST, BACKUP = 16 }; /* what the functions for Python return */

/* Find the driver; OK where it has been found already. */
int driver_open(Failure *why);

/* Note the first refusal of the driver. */
CUresult check(Failure *why, const char *what, CUresult result);
#define TRY(why, name, ...) check(why, #name, cu.name(__VA_ARGS__))

/* Note a reason of our own, if there is none yet; returns `code`. */
int say(Failure *why, int code, const char *text);
#endif
