"""A real text for comparing logits: plain prose, figures, a list, a little code. *Pure.*"""

from __future__ import annotations

TEXT = """\
The harbour lies at the end of a long valley. In the morning, fog comes up the river and covers the
lower streets, so that only the church, the old grain store and two cranes can be seen from the
hills. By ten o'clock it is usually gone. Then the ferries begin to cross, every twenty minutes in
summer and once an hour in winter, and the first lorries arrive from the north with timber.

Ships used to wait here for days. There were three berths, and whoever came first unloaded first,
however little there was to unload. A small boat with forty crates of apples could keep a freighter
with nine thousand tonnes of ore outside the pier until the next tide. In 1931 the harbour master
changed this: he let ships share a berth, told every captain in advance how long it would take, and
wrote down whether he had been right. After one year he was wrong by less than half an hour in nine
cases out of ten, and the average wait had fallen from 31 hours to 6.

His rules were simple:

1. Nobody is promised a place that is not free.
2. Whoever waits is told why, and for how long.
3. A ship that leaves takes its cargo with it; nothing is left on the quay overnight.

People asked him later how he had come to think of it. "I counted," he said. "Before that, everybody
had an opinion, and nobody had a number." He kept the numbers in a small grey book, which is now in
the town's museum, between a stuffed heron and the ship's bell of the Adelheid.

Today a program does what he did, and it is not much longer than his rules:

    def next_ship(waiting, free_metres):
        for ship in sorted(waiting, key=lambda ship: ship.arrived):
            if ship.length <= free_metres:
                return ship
        return None

The fog, however, still comes in the morning, and on such days the pilots go out as they always
have: slowly, with a lamp at the bow, listening for the bell.
"""
