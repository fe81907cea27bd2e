"""Workers, from READY to their loss (*pure*).

- ``workers``, ``welcome``: who serves a device; ``residency``: what it says about the device
- ``commanding``, ``links``: commands and the fence around their replies
- ``devices``: what is known of a device
"""
