"""Sleep and wake of device memory at unchanged addresses, for cuda workers.

The C files are a small library that is preloaded into the worker: it answers ``cudaMalloc`` inside
tagged regions with memory whose physical pages can be given back and taken again (``vmm.c``, and
what it needs), and puts copies together (``gather.c``). ``build``
compiles it, ``preload`` says whether it can be used here and starts the worker with it,
``library`` is what the engine calls.
"""
