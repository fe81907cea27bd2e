/* Pinned host memory that holds the contents of blocks, and the copies out and in. */
#include "tag.h"

#include <stdlib.h>

#include "way.h"

#ifndef CHUNK
#define CHUNK ((size_t)64 << 20) /* pinning holds the driver's locks: in pieces others get a turn */
#endif
#ifndef PIECE
#define PIECE ((size_t)16 << 20) /* copied in at a time: small copies of others wait for so much */
#endif
#ifndef GIVE_WAY_NS
#define GIVE_WAY_NS 3000000u /* so long a wake puts its pieces off for others, all in all */
#endif

static _Atomic size_t piece = PIECE;
static _Atomic uint64_t give_way_ns = GIVE_WAY_NS;

void backup_pace(uint64_t piece_bytes, uint64_t give_ns)
{
    piece = piece_bytes;
    give_way_ns = give_ns;
}

uint64_t backup_patience(void) { return give_way_ns; }

static size_t chunk_bytes(const Block *b, size_t i)
{
    size_t left = b->asked - i * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

uint64_t backup_bytes(const Block *b)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < b->chunks; i++) bytes += chunk_bytes(b, i);
    return bytes;
}

CUresult backup_drop(Block *b, Failure *why)
{
    b->backed_up = false;
    while (b->chunks) {
        CUresult r = TRY(why, cuMemFreeHost, b->chunk[b->chunks - 1]);
        if (r != SUCCESS) return r;
        b->chunks--;
    }
    free(b->chunk);
    b->chunk = NULL;
    return SUCCESS;
}

CUresult stream_need(Tag *tag, Failure *why)
{
    CUresult r = SUCCESS;
    if (!tag->stream) r = TRY(why, cuStreamCreate, &tag->stream, NON_BLOCKING);
    for (int i = 0; i < 2 && r == SUCCESS; i++)
        if (!tag->landed[i]) r = TRY(why, cuEventCreate, &tag->landed[i], NO_TIMING);
    return r;
}

/* Also after a failure: copies may be under way. */
CUresult stream_finish(Tag *tag, Failure *why, CUresult before)
{
    CUresult finished = tag->stream ? TRY(why, cuStreamSynchronize, tag->stream) : SUCCESS;
    return before != SUCCESS ? before : finished;
}

CUresult stream_drop(Tag *tag)
{
    CUresult r = SUCCESS;
    for (int i = 0; i < 2 && r == SUCCESS; i++) {
        if (tag->landed[i]) r = cu.cuEventDestroy(tag->landed[i]);
        if (r == SUCCESS) tag->landed[i] = NULL;
    }
    if (r == SUCCESS && tag->stream) r = cu.cuStreamDestroy(tag->stream);
    if (r == SUCCESS) tag->stream = NULL;
    return r;
}

/* Pinned memory for the block, and the copies into it under way. */
static CUresult copy_out(Tag *tag, Block *b, Failure *why)
{
    CUresult r = backup_drop(b, why); /* what an earlier drop could not give back */
    if (r != SUCCESS) return r;
    size_t wanted = (b->asked + CHUNK - 1) / CHUNK;
    if (!(b->chunk = calloc(wanted, sizeof *b->chunk))) return OUT_OF_MEMORY;
    for (size_t i = 0; i < wanted && r == SUCCESS; i++) {
        r = TRY(why, cuMemHostAlloc, &b->chunk[i], chunk_bytes(b, i), 0);
        if (r != SUCCESS) break;
        b->chunks++;
        r = TRY(why, cuMemcpyDtoHAsync, b->chunk[i], b->address + i * CHUNK, chunk_bytes(b, i),
                tag->stream);
    }
    return r;
}

/* Two pieces are under way at any time, one behind the other: the bus is never idle, and what others
 * copy meanwhile (KV that comes back, the inputs of a decode) has little before it. All of it queued
 * at once (a piece of 0 bytes) would be in front of them, for milliseconds. */
CUresult backup_copy_in(Tag *tag, Block *b, Failure *why)
{
    CUresult r = SUCCESS;
    size_t paced = piece, step = paced && paced < CHUNK ? paced : CHUNK;
    for (size_t i = 0; i < b->chunks; i++)
        for (size_t at = 0; at < chunk_bytes(b, i) && r == SUCCESS; at += step) {
            size_t left = chunk_bytes(b, i) - at;
            CUevent landed = tag->landed[tag->turn++ % 2];
            if (paced) r = TRY(why, cuEventSynchronize, landed); /* the piece before the last */
            if (r == SUCCESS && paced) {
                uint64_t given = way_give(tag->patience_ns);
                tag->patience_ns -= given < tag->patience_ns ? given : tag->patience_ns;
            }
            if (r == SUCCESS)
                r = TRY(why, cuMemcpyHtoDAsync, b->address + i * CHUNK + at,
                        (const char *)b->chunk[i] + at, left < step ? left : step, tag->stream);
            if (r == SUCCESS && paced) r = TRY(why, cuEventRecord, landed, tag->stream);
        }
    return r;
}

int backup_make(Tag *tag, Failure *why)
{
    uint64_t need = 0;
    CUresult r = SUCCESS;
    for (Block *b = tag->blocks; b; b = b->next) {
        b->fresh = false;
        if (b->backed_up) continue;
        if (!b->mapped) return say(why, LOST, "it sleeps, and its contents are gone");
        need += b->asked;
    }
    if (!need) return OK;
    r = stream_need(tag, why);
    for (Block *b = tag->blocks; b && r == SUCCESS; b = b->next)
        if (!b->backed_up) {
            b->fresh = true;
            r = copy_out(tag, b, why);
        }
    r = stream_finish(tag, why, r);
    for (Block *b = tag->blocks; b; b = b->next) {
        if (b->fresh && r == SUCCESS) b->backed_up = true;
        if (b->fresh && r != SUCCESS) backup_drop(b, why);
    }
    if (r == SUCCESS) return OK;
    if (why) why->need_bytes = need;
    return say(why, REFUSED, "no host memory");
}
