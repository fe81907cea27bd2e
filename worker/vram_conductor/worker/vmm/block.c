/* Address ranges, and the device memory that is mapped into them. */
#include "tag.h"

#include <string.h>

static CUmemAllocationProp properties(CUdevice device)
{
    CUmemAllocationProp p;
    memset(&p, 0, sizeof p);
    p.type = PINNED;
    p.location.type = ON_DEVICE;
    p.location.id = device;
    return p;
}

CUresult block_unmap(Block *b, Failure *why)
{
    CUresult r = TRY(why, cuMemUnmap, b->address, b->bytes);
    if (r == SUCCESS) b->mapped = false;
    return r;
}

/* Physical memory for the block. The mapping keeps it alive, so that the handle is released at
 * once and an unmap gives everything back. */
CUresult block_map(Block *b, Failure *why)
{
    CUmemAllocationProp memory = properties(b->device);
    CUmemAccessDesc access = {memory.location, READ_WRITE};
    CUhandle handle;
    CUresult r = TRY(why, cuMemCreate, &handle, b->bytes, &memory, 0);
    if (r != SUCCESS) return r;
    r = TRY(why, cuMemMap, b->address, b->bytes, 0, handle, 0);
    b->mapped = r == SUCCESS;
    CUresult released = TRY(why, cuMemRelease, handle);
    if (r == SUCCESS) r = released;
    if (r == SUCCESS) r = TRY(why, cuMemSetAccess, b->address, b->bytes, &access, 1);
    if (r != SUCCESS && b->mapped) block_unmap(b, why);
    if (released != SUCCESS) cu.cuMemRelease(handle); /* or its memory is lost for good */
    return r;
}

CUresult block_reserve(Block *b)
{
    CUmemAllocationProp memory = properties(b->device);
    size_t unit = 0;
    CUresult r = cu.cuMemGetAllocationGranularity(&unit, &memory, 0);
    if (r != SUCCESS) return r;
    if (!unit || b->asked > SIZE_MAX - unit) return OUT_OF_MEMORY;
    b->bytes = (b->asked + unit - 1) / unit * unit;
    return cu.cuMemAddressReserve(&b->address, b->bytes, 0, 0, 0);
}
