/* Host memory that stands in for the device's. */
#ifndef VMM_HOST_H
#define VMM_HOST_H
#include "driver.h"

#define ON_HOST UINT64_MAX /* the region's tag */

CUresult host_malloc(void **pointer, size_t bytes);
/* Whether it is ours; then the result of freeing it. */
bool host_free(void *pointer, CUresult *result);
#endif
