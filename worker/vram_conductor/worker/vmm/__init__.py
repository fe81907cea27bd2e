"""Sleep and wake of device memory at unchanged addresses, for cuda workers.

``vmm.c`` is a small library that is preloaded into the worker: it answers ``cudaMalloc`` inside
tagged regions with memory whose physical pages can be given back and taken again. ``build``
compiles it, ``preload`` says whether it can be used here and starts the worker with it,
``library`` is what the engine calls.
"""
