/* The runtime's own functions, wherever it was loaded from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "vmm.h"

enum { RUNTIME_MISSING = 3 }; /* cudaErrorInitializationError */

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

int runtime_malloc(void **pointer, size_t bytes)
{
    static int (*_Atomic function)(void **, size_t); /* two threads store the same */
    if (!function) function = (int(*)(void **, size_t))vmm_real("cudaMalloc");
    return function ? function(pointer, bytes) : RUNTIME_MISSING;
}

int runtime_free(void *pointer)
{
    static int (*_Atomic function)(void *);
    if (!function) function = (int(*)(void *))vmm_real("cudaFree");
    return function ? function(pointer) : RUNTIME_MISSING;
}
