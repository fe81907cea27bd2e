/* A whole tag falls asleep, and wakes. */
#define _GNU_SOURCE
#include "tag.h"

#include <time.h>

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Every sleeping block gets memory; copies begin as soon as a block is mapped. What has no contents
 * to come back is cleared: garbage can be anything, also a number that spreads. */
static CUresult wake_blocks(Tag *tag, Failure *why, uint64_t *map_ns)
{
    CUresult r = SUCCESS;
    tag->patience_ns = backup_patience();
    for (Block *b = tag->blocks; b && r == SUCCESS; b = b->next) {
        if (b->mapped) continue;
        uint64_t begun = clock_ns();
        r = block_map(b, why);
        *map_ns += clock_ns() - begun;
        b->fresh = b->mapped;
        if (r == SUCCESS) r = stream_need(tag, why);
        if (r == SUCCESS && b->kept) r = backup_copy_in(tag, b, why);
        else if (r == SUCCESS) r = TRY(why, cuMemsetD8Async, b->address, 0, b->bytes, tag->stream);
    }
    return stream_finish(tag, why, r);
}

int tag_wake(Tag *tag, Failure *why)
{
    uint64_t need = 0, begun = clock_ns(), map_ns = 0;
    size_t free_bytes = 0, total = 0;
    for (Block *b = tag->blocks; b; b = b->next) {
        b->fresh = false;
        if (b->mapped) continue;
        if (b->kept && !b->backed_up) return say(why, LOST, "its backup was dropped");
        need += b->bytes;
    }
    if (!need) return OK;
    CUresult r = TRY(why, cuMemGetInfo, &free_bytes, &total);
    if (r != SUCCESS) return REFUSED;
    why->need_bytes = need;
    why->free_bytes = free_bytes;
    if (free_bytes < need) return say(why, NO_MEMORY, "too little free memory");
    r = wake_blocks(tag, why, &map_ns);
    for (Block *b = tag->blocks; b; b = b->next) {
        if (b->fresh && r != SUCCESS) block_unmap(b, why); /* fully asleep again */
        if (b->fresh && r == SUCCESS) b->kept = false;
    }
    if (r != SUCCESS) return r == OUT_OF_MEMORY ? NO_MEMORY : REFUSED;
    tag->wake_map_ns = map_ns;
    tag->wake_copy_ns = clock_ns() - begun - map_ns;
    return OK;
}

int tag_sleep(Tag *tag, bool keep, Failure *why)
{
    CUresult r = SUCCESS;
    Failure ignored = {0};
    bool awake = false;
    for (Block *b = tag->blocks; b; b = b->next) awake = awake || b->mapped;
    if (keep && awake) {
        int code = backup_make(tag, why);
        if (code) return BACKUP + code;
    }
    for (Block *b = tag->blocks; b && r == SUCCESS; b = b->next) {
        if (!b->mapped) continue;
        r = block_unmap(b, why);
        if (r == SUCCESS) b->kept = keep;
    }
    if (r == SUCCESS) return OK;
    tag_wake(tag, &ignored);
    return REFUSED;
}
