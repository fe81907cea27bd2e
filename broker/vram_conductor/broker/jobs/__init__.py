"""Jobs, from DECODE to DONE (*pure*).

- ``job_desk``: what clients ask; ``job``: what a DECODE becomes; ``queue``: where it waits
- ``dispatch``, ``attempts``: to the worker, and what comes back
- ``delivery``: output to the client; ``ending``: the record and the receipt
"""
