"""What ``conductor bench`` asks of this side, each in a process of its own that prints JSON.

``random_models`` makes GGUFs to measure with, ``rates`` measures what the hardware can copy,
``memory`` watches a device from outside.
"""
