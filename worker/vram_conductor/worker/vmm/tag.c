/* The list of tags, and who has which in hand. */
#include "tag.h"

#include <stdlib.h>

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static Tag *tags;

Tag *tag_take(uint64_t id, bool make)
{
    Tag *tag;
    pthread_mutex_lock(&registry);
    for (tag = tags; tag && tag->id != id; tag = tag->next) { }
    if (!tag && make && (tag = calloc(1, sizeof *tag))) {
        tag->id = id;
        pthread_mutex_init(&tag->lock, NULL);
        tag->next = tags;
        tags = tag;
    }
    if (tag) tag->users++;
    pthread_mutex_unlock(&registry);
    if (tag) pthread_mutex_lock(&tag->lock);
    return tag;
}

Tag *tag_take_owner(CUdeviceptr address)
{
    uint64_t id = 0;
    pthread_mutex_lock(&registry);
    for (Tag *tag = tags; tag && !id; tag = tag->next)
        for (Block *b = tag->blocks; b; b = b->next)
            if (b->address == address) id = tag->id;
    pthread_mutex_unlock(&registry);
    return id ? tag_take(id, false) : NULL;
}

void tag_give(Tag *tag)
{
    pthread_mutex_unlock(&tag->lock);
    pthread_mutex_lock(&registry);
    if (--tag->users == 0 && !tag->blocks) {
        Tag **link = &tags;
        while (*link != tag) link = &(*link)->next;
        *link = tag->next;
        pthread_mutex_destroy(&tag->lock);
        free(tag);
    }
    pthread_mutex_unlock(&registry);
}

CUresult tag_enter(Tag *tag, bool *pushed, Failure *why)
{
    CUcontext current = NULL;
    CUresult r = TRY(why, cuCtxGetCurrent, &current);
    *pushed = false;
    if (r == SUCCESS && current != tag->context) {
        r = TRY(why, cuCtxPushCurrent, tag->context);
        *pushed = r == SUCCESS;
    }
    return r;
}

/* A pop that fails leaves the thread in a context of the same device: nothing depends on it. */
void tag_leave(bool pushed)
{
    CUcontext ignored;
    if (pushed) cu.cuCtxPopCurrent(&ignored);
}

void tag_add(Tag *tag, Block *b)
{
    pthread_mutex_lock(&registry);
    b->next = tag->blocks;
    tag->blocks = b;
    pthread_mutex_unlock(&registry);
}

void tag_remove(Tag *tag, Block *b)
{
    Block **link = &tag->blocks;
    pthread_mutex_lock(&registry);
    while (*link != b) link = &(*link)->next;
    *link = b->next;
    pthread_mutex_unlock(&registry);
}
