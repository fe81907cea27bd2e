/* Pinned host memory in place of the device's, for contexts that are made only to see how large
 * they would be: the device can reach it, so that whoever clears it notices nothing. */
#define _GNU_SOURCE
#include "host.h"

#include <pthread.h>
#include <stdlib.h>

#include "vmm.h"

typedef struct Loan {
    struct Loan *next;
    void *address;
} Loan;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Loan *loans;

CUresult host_malloc(void **pointer, size_t bytes)
{
    Loan *loan = calloc(1, sizeof *loan);
    if (!loan) return OUT_OF_MEMORY;
    CUresult r = runtime_free(NULL); /* makes the runtime's context this thread's */
    if (r == SUCCESS) r = cu.cuMemHostAlloc(&loan->address, bytes, 0);
    if (r != SUCCESS) {
        free(loan);
        return r;
    }
    *pointer = loan->address;
    pthread_mutex_lock(&lock);
    loan->next = loans;
    loans = loan;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

bool host_free(void *pointer, CUresult *result)
{
    pthread_mutex_lock(&lock);
    Loan **at = &loans, *loan;
    while (*at && (*at)->address != pointer) at = &(*at)->next;
    loan = *at;
    if (loan) *at = loan->next;
    pthread_mutex_unlock(&lock);
    if (!loan) return false;
    *result = cu.cuMemFreeHost(pointer); /* who frees has waited, see free_block() */
    if (*result == SUCCESS) {
        free(loan);
        return true;
    }
    pthread_mutex_lock(&lock); /* it can be tried again */
    loan->next = loans;
    loans = loan;
    pthread_mutex_unlock(&lock);
    return true;
}
