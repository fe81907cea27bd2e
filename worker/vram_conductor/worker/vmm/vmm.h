/* What the parts of the preload library share. */
#define API __attribute__((visibility("default")))

/* The runtime's own function of that name, NULL if there is none. */
void *vmm_real(const char *name);
