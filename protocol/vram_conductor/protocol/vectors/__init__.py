"""Golden vectors: every message, and a rich set of broken ones, as frames in hexadecimal.

``python -m vram_conductor.protocol.vectors`` writes ``protocol/vectors/*.json``; with ``--check``
it compares instead. Whoever implements the protocol in another language tests against the files.
"""
