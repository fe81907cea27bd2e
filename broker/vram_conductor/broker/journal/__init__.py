"""What the broker must still know after it was killed.

- ``records``: the facts; ``restored``: their sum (*pure*)
- ``format``, ``replay``: bytes to facts, damage included (*pure*)
- ``opening``, ``journal``, ``files``, ``backlog``: the file, and a disk that is full
- ``state_lock``: one broker at a time
"""
