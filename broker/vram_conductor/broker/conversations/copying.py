"""What became of a FORK (*pure*): kept with the copy, for whoever asks again."""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.conversations import ForkReceipt


@dataclass(slots=True)
class Copying:
    """A FORK, in progress or done.

    Attributes:
        rid: of the request.
        peer: who waits for the answer; None: it was given.
        receipt: the answer, as far as it is known.
    """

    rid: bytes
    peer: bytes | None
    receipt: ForkReceipt
