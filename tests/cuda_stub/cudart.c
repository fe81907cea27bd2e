/* A stand-in for libcudart: what runs outside regions, and for pointers that are not ours. */
#include <pthread.h>
#include <stdlib.h>

void stub_attach(void);

enum { SLOTS = 4096 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *held[SLOTS];
static int count;

int cudart_count(void) { return count; }

int cudaMalloc(void **pointer, size_t bytes)
{
    stub_attach();
    *pointer = NULL;
    if (!bytes) return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS && !*pointer; i++)
        if (!held[i]) *pointer = held[i] = malloc(bytes);
    count++;
    pthread_mutex_unlock(&lock);
    return *pointer ? 0 : 2;
}

int cudaFree(void *pointer)
{
    int result = pointer ? 1 : 0;
    stub_attach();
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (pointer && held[i] == pointer) {
            free(pointer);
            held[i] = NULL;
            count--;
            result = 0;
        }
    pthread_mutex_unlock(&lock);
    return result;
}
