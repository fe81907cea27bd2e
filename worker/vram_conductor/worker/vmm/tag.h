/* Tags, and the blocks of memory that belong to them.
 *
 * Locks. `registry` protects the list of tags and every tag's list of blocks; it is held for list
 * walks only. A tag's own lock is held while its blocks change, however long that takes, so that a
 * move of one tag stops nobody but its own users. Order: a tag's lock, then `registry`. A list of
 * blocks is changed with both and may be read with either. */
#ifndef VMM_TAG_H
#define VMM_TAG_H
#include <pthread.h>

#include "driver.h"

typedef struct Block { /* one cudaMalloc */
    struct Block *next;
    CUdeviceptr address;
    size_t asked, bytes; /* asked for; rounded up to the driver's granularity */
    CUdevice device;
    bool mapped;    /* backed by device memory now */
    bool kept;      /* asleep: its contents are in the backup, and wanted */
    bool backed_up; /* the chunks hold its contents */
    bool fresh;     /* changed by the call that is under way */
    size_t chunks;
    void **chunk; /* pinned host memory, CHUNK bytes each but the last */
} Block;

typedef struct Tag {
    struct Tag *next;
    uint64_t id;
    int users; /* calls that have it in hand, under `registry` */
    pthread_mutex_t lock;
    CUcontext context;
    CUstream stream; /* of its copies; made at the first */
    CUevent landed[2]; /* the last piece that was copied in, and the one before, by turns */
    unsigned turn;
    uint64_t patience_ns; /* so long the wake that is under way still gives way to others */
    Block *blocks;
    uint64_t wake_map_ns, wake_copy_ns;
} Tag;

/* --- tag.c: the list of tags -- */

/* The tag, locked; NULL if there is none and none is to be made, or no memory for one. */
Tag *tag_take(uint64_t id, bool make);
/* The tag of the block that begins at `address`, locked; NULL if it is not ours. */
Tag *tag_take_owner(CUdeviceptr address);
/* Undo tag_take(); a tag without blocks that nobody else has in hand goes. */
void tag_give(Tag *tag);
/* Work in the tag's context, whatever the thread's is. Undone by tag_leave(). */
CUresult tag_enter(Tag *tag, bool *pushed, Failure *why);
void tag_leave(bool pushed);
void tag_add(Tag *tag, Block *b);
void tag_remove(Tag *tag, Block *b);

/* --- block.c: addresses and the memory behind them -- */

CUresult block_reserve(Block *b);
/* Physical memory for the block. */
CUresult block_map(Block *b, Failure *why);
CUresult block_unmap(Block *b, Failure *why);

/* --- backup.c: pinned host memory, and copies. The tag is locked, its context current -- */

/* Copy out what has no backup yet. */
int backup_make(Tag *tag, Failure *why);
/* Give the pinned memory back. */
CUresult backup_drop(Block *b, Failure *why);
uint64_t backup_bytes(const Block *b);
/* From now on blocks are copied in by pieces of so many bytes (0: all at once), and a wake waits for
 * others who copy in for so long. */
void backup_pace(uint64_t piece_bytes, uint64_t give_ns);
uint64_t backup_patience(void);
/* Begin to copy a block in; stream_finish() waits for the last of it. */
CUresult backup_copy_in(Tag *tag, Block *b, Failure *why);
CUresult stream_need(Tag *tag, Failure *why);
/* Wait for what is on it; `before`, where that was an error already. */
CUresult stream_finish(Tag *tag, Failure *why, CUresult before);
CUresult stream_drop(Tag *tag);

/* --- sleep.c: moves of a whole tag, which is locked and whose context is current -- */

int tag_wake(Tag *tag, Failure *why);
int tag_sleep(Tag *tag, bool keep, Failure *why);
#endif
