"""The broker: admits agents, queues jobs, streams replies. No CUDA, no llama.cpp.

A pure core (``core`` and what it is made of) and a shell around it:

- ``core``, ``state``, ``events``, ``effects``: one event in, effects out; ``invariants`` for tests
- ``clients``, ``sessions``, ``registry``, ``report``: who is there, and what they see
- ``boot``, ``drain``, ``timers``, ``errors``: begin, end, deadlines, words
- ``agents``: REGISTER to UNREGISTER
- ``jobs``: DECODE to DONE; ``conversations``: RESET, FORK, HISTORY
- ``workers``: READY to loss, commands and their replies
- ``ledger``: who was promised how many bytes
- ``journal``: what survives the broker
- ``shell``: sockets, the loop, the process
"""
