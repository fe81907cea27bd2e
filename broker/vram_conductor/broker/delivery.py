"""A job's output on its way to its client (*pure*): attach, pump, detach."""

from __future__ import annotations

from vram_conductor.broker.effects import SendClient
from vram_conductor.broker.jobs import Job
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.protocol.messages import Tokens


class Delivery:
    """Moves what the streams hold to whoever listens, as far as the credit goes."""

    def __init__(self, state: State) -> None:
        self._state = state

    def attach(self, job: Job, session: Session) -> None:
        """The session receives the job's output from now on, and nobody else."""
        old = self._state.sessions.find(job.peer) if job.peer is not None else None
        if old is not None:
            old.jobs.discard(job.job)
        job.peer = session.peer
        session.jobs.add(job.job)
        self._state.timers.cancel(("orphan", job.job))

    def detach(self, job: Job) -> None:
        """The client is gone; the output waits."""
        session = self._state.sessions.find(job.peer) if job.peer is not None else None
        if session is not None:
            session.jobs.discard(job.job)
        job.peer = None
        job.stream.detach(self._state.now_ns)

    def pump(self, job: Job) -> None:
        """Send every piece that the credit allows, and the terminal message behind the last."""
        peer = job.peer
        if peer is None:
            return
        effects = self._state.effects
        while pieces := job.stream.take():
            effects.extend(
                SendClient(
                    peer,
                    Tokens(rid=job.rid, seq=piece.seq, text=piece.text, ids=list(piece.ids)),
                )
                for piece in pieces
            )
        if job.terminal is not None and job.stream.take_end():
            effects.append(SendClient(peer, job.terminal))
