/* Who copies little goes first: see way.c. */
#ifndef VMM_WAY_H
#define VMM_WAY_H
#include <stdint.h>

/* Copies to the device are on a stream of the calling thread now; they have landed. In pairs. */
void way_take(void);
void way_leave(void);

/* Wait until nobody has the way, `limit_ns` at most; how long that took. */
uint64_t way_give(uint64_t limit_ns);
#endif
