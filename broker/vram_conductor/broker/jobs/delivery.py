"""A job's output on its way to its client (*pure*): attach, pump, detach.

Output waits in the job's stream, which is bounded, until its client has credit for it and reads:
to a client that is behind nothing more is given, whatever its credit. A long stream that is resumed
leaves a part at a time, so that the others' turns come in between.
"""

from __future__ import annotations

from vram_conductor.broker.effects import SendClient
from vram_conductor.broker.jobs.job import Job
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.protocol.messages import Tokens

PIECES_AT_ONCE = 64
"""Of one job, before another one's."""

PIECES_PER_TURN = 512
"""Of all jobs that have more to send; then the loop turns."""


class Delivery:
    """Moves what the streams hold to whoever listens, as far as the credit goes."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._unfinished: dict[int, None] = {}
        """Numbers of the jobs that have more to send, in the order of their turns."""

    def attach(self, job: Job, session: Session) -> None:
        """The session receives the job's output from now on, and nobody else."""
        old = self._session(job)
        if old is not None:
            old.jobs.discard(job.job)
        job.peer = session.peer
        session.jobs.add(job.job)
        self._state.timers.cancel(("orphan", job.job))

    def detach(self, job: Job) -> None:
        """The client is gone; the output waits."""
        session = self._session(job)
        if session is not None:
            session.jobs.discard(job.job)
        job.peer = None
        job.stream.detach()

    def pump(self, job: Job) -> None:
        """There may be something to send: do it, unless the job waits for its turn already."""
        if job.job not in self._unfinished:
            self._send(job, PIECES_AT_ONCE)

    def turn(self) -> None:
        """Send more of the unfinished, each in its turn."""
        left = PIECES_PER_TURN
        while self._unfinished and left > 0:
            number = next(iter(self._unfinished))
            del self._unfinished[number]
            job = self._state.jobs.find(number)
            if job is not None:
                left -= self._send(job, min(left, PIECES_AT_ONCE))
        self._call_again()

    def flow(self, session: Session, *, behind: bool) -> None:
        """The client is behind with reading, or has caught up."""
        session.behind = behind
        if not behind:
            self._unfinished |= dict.fromkeys(sorted(session.jobs - self._unfinished.keys()))
            self._call_again()

    def _send(self, job: Job, most: int) -> int:
        """Send up to ``most`` pieces, and the terminal message behind the last; returns how many
        pieces went."""
        session = self._session(job)
        if session is None or session.behind:
            return 0
        pieces = job.stream.take(most)
        effects, peer = self._state.effects, session.peer
        effects.extend(
            SendClient(
                peer, Tokens(rid=job.rid, seq=piece.seq, text=piece.text, ids=list(piece.ids))
            )
            for piece in pieces
        )
        if job.stream.sendable:
            self._unfinished[job.job] = None
            self._call_again()
        elif job.terminal is not None and job.stream.take_end():
            effects.append(SendClient(peer, job.terminal))
        return len(pieces)

    def _call_again(self) -> None:
        if self._unfinished:
            # Later than anything that is due now: nothing is overtaken.
            self._state.timers.set(("pump", None), self._state.now_ns + 1)
        else:
            self._state.timers.cancel(("pump", None))

    def _session(self, job: Job) -> Session | None:
        return self._state.sessions.find(job.peer) if job.peer is not None else None
