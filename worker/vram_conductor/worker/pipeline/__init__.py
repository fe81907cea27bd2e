"""A forward pass over layers that do not fit on the device, one window at a time.

While one layer computes, the next one travels. ``schedule`` says in which order (pure), ``streams``
what a device must be able to do for it, ``stream_host`` and ``stream_cuda`` do it, ``runner`` puts
a schedule on streams.
"""
