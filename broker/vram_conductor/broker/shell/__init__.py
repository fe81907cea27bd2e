"""Everything that is not pure: the process around the core.

- ``app``, ``options``, ``stop``, ``logs``, ``metrics``: the process
- ``loop``: sockets and clock on one side, the core on the other
- ``port``, ``outbox``, ``large_sends``: a ROUTER that neither blocks nor fills the memory
- ``peer_watch``, ``peer_process``, ``auth``: who is at the other end, and whether it still is
"""
