/* Who uses libcudart as llama.cpp does: linked, with a versioned name. */
#include <stddef.h>

int cudaMalloc(void **pointer, size_t bytes);
int cudaFree(void *pointer);

int client_malloc(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
int client_free(void *pointer) { return cudaFree(pointer); }

int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream);
int cudaStreamSynchronize(void *stream);

int client_copy(void *to, const void *from, size_t n, int kind, void *stream)
{
    return cudaMemcpyAsync(to, from, n, kind, stream);
}
int client_wait(void *stream) { return cudaStreamSynchronize(stream); }
