/* A stand-in for libcudart: what runs outside regions, and for pointers that are not ours. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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

/* --- copies: done when their stream is waited for, and not before ------------------------------ */

enum { PENDING = 65536, TO_DEVICE = 1, TO_HOST = 2, LAUNCH_FAILED = 719 };
typedef struct { char *to; const char *from; size_t to_step, from_step, width, rows; void *stream; } Copy;
static Copy pending[PENDING];
static int queued, copies, waits, fail_after;
static pthread_cond_t let_go = PTHREAD_COND_INITIALIZER;
static int held_back;

void cudart_copies(int *made, int *waited)
{
    *made = copies;
    *waited = waits;
    copies = waits = 0;
}

/* The nth copy or wait from now fails; 0 disarms. */
void cudart_arm(int nth) { fail_after = nth; }

/* From now on (1) nothing is copied until that ends (0): who waits, waits. */
void cudart_hold(int begin)
{
    pthread_mutex_lock(&lock);
    held_back = begin;
    pthread_cond_broadcast(&let_go);
    pthread_mutex_unlock(&lock);
}

/* How many copies nobody has waited for to the end. */
int cudart_queued(void)
{
    pthread_mutex_lock(&lock);
    int left = queued;
    pthread_mutex_unlock(&lock);
    return left;
}

static int enqueue(Copy copy)
{
    int failed;
    pthread_mutex_lock(&lock);
    failed = fail_after > 0 && --fail_after == 0;
    copies++;
    if (!failed) {
        if (queued == PENDING) abort();
        pending[queued++] = copy;
    }
    pthread_mutex_unlock(&lock);
    return failed ? LAUNCH_FAILED : 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream)
{
    if (kind == 3) { /* within the device: at once, so that an overtaking is seen */
        memmove(to, from, n);
        return 0;
    }
    return enqueue((Copy){to, from, n, n, n, 1, stream});
}

int cudaMemcpy2DAsync(void *to, size_t to_step, const void *from, size_t from_step, size_t width,
                      size_t rows, int kind, void *stream)
{
    if ((kind != TO_DEVICE && kind != TO_HOST) || to_step < width || from_step < width ||
        to_step >> 31 || from_step >> 31)
        return 1;
    return enqueue((Copy){to, from, to_step, from_step, width, rows, stream});
}

int cudaStreamSynchronize(void *stream)
{
    int left = 0, failed;
    pthread_mutex_lock(&lock);
    while (held_back) pthread_cond_wait(&let_go, &lock);
    waits++;
    failed = fail_after > 0 && --fail_after == 0;
    for (int i = 0; i < queued; i++) {
        Copy *copy = &pending[i];
        if (copy->stream != stream)
            pending[left++] = *copy;
        else
            for (size_t row = 0; row < copy->rows; row++)
                memcpy(copy->to + row * copy->to_step, copy->from + row * copy->from_step, copy->width);
    }
    queued = left;
    pthread_mutex_unlock(&lock);
    return failed ? LAUNCH_FAILED : 0;
}
