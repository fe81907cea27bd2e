/* Preloaded: the time of day is wrong by SKEWED_CLOCK_S seconds; clocks that only run are right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t skew_s(void)
{
    const char *text = getenv("SKEWED_CLOCK_S");
    return text ? (time_t)strtoll(text, NULL, 10) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int (*real)(clockid_t, struct timespec *);
    *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += skew_s();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out)
        *out = exact.tv_sec;
    return exact.tv_sec;
}
