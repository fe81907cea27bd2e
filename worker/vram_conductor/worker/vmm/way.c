/* The way to the device is one for all: copies of one direction go one after the other, whatever
 * their streams, and a stream's priority does not count for them (CUDA runtime API,
 * cudaStreamCreateWithPriority). A model that wakes is hundreds of megabytes; a conversation's KV
 * is a few. So a wake puts its next piece off while somebody copies KV in. */
#define _GNU_SOURCE
#include "way.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gone;
static atomic_int guests;

static void make(void)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&gone, &clock);
    pthread_condattr_destroy(&clock);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void way_take(void) { atomic_fetch_add(&guests, 1); }

void way_leave(void)
{
    pthread_once(&once, make);
    pthread_mutex_lock(&lock);
    if (atomic_fetch_sub(&guests, 1) == 1) pthread_cond_broadcast(&gone);
    pthread_mutex_unlock(&lock);
}

uint64_t way_give(uint64_t limit_ns)
{
    if (!limit_ns || !atomic_load(&guests)) return 0;
    pthread_once(&once, make);
    uint64_t begun = now_ns(), end = begun + limit_ns;
    struct timespec until = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
    pthread_mutex_lock(&lock);
    for (int late = 0; atomic_load(&guests) && !late;)
        late = pthread_cond_timedwait(&gone, &lock, &until);
    pthread_mutex_unlock(&lock);
    return now_ns() - begun;
}
