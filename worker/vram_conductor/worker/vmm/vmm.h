/* What the parts of the preload library share. */
#ifndef VMM_H
#define VMM_H
#include <stddef.h>

#define API __attribute__((visibility("default")))

/* The runtime's own function of that name, NULL if there is none. */
void *vmm_real(const char *name);

/* The runtime's own cudaMalloc and cudaFree; its error code. */
int runtime_malloc(void **pointer, size_t bytes);
int runtime_free(void *pointer);
#endif
