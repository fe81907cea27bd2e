"""The client's state machine (*pure*): session, requests, replies, reconnection.

Both shells drive it the same way: hand in what arrived (:meth:`ClientCore.handle`), what the
connection did (:meth:`ClientCore.lost`) and the time (:meth:`ClientCore.tick`), act on the
effects, then send what is in :attr:`ClientCore.outgoing`.

What a lost connection means. The core dials again. Requests other than DECODE can be repeated
without harm, so they are. A job goes on by RESUME, or by the same DECODE with the same ``rid`` if
the broker never confirmed it, as long as it is the same broker (``broker_epoch``): it knows the
``rid``. A restarted broker does not, so a repeated DECODE could run twice: those jobs end with
UNAVAILABLE ``broker_restarted``, and the caller decides. A broker that leaves in order says which
jobs it has not begun; they, and what comes meanwhile, wait for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from vram_conductor.client.calls import CallMessage, Calls, call_key
from vram_conductor.client.effects import Connect, Down, Effect, Failed, Opened, Warn
from vram_conductor.client.job import Job
from vram_conductor.client.session import Phase, Session, Timing
from vram_conductor.protocol.errors import (
    Cancelled,
    ConductorError,
    Unimplemented,
    error_from_info,
)
from vram_conductor.protocol.messages import (
    BrokerMessage,
    Bye,
    ClientMessage,
    Decode,
    Error,
    GoAway,
    Ok,
    Ping,
    Pong,
    Progress,
    Register,
    Welcome,
)
from vram_conductor.protocol.values import Usage


class ClientCore:
    """One client's state. Not thread-safe: it has one owner.

    Attributes:
        outgoing: messages to send, oldest first; the shell removes what the socket took.
    """

    def __init__(self, endpoint: str, client: str, timing: Timing | None = None) -> None:
        self.outgoing: deque[ClientMessage] = deque()
        self._timing = timing or Timing()
        self._session = Session(endpoint, client, self._timing)
        self._calls = Calls()
        self._jobs: dict[bytes, Job] = {}
        self._due_ns: int | None = None

    @property
    def phase(self) -> Phase:
        return self._session.phase

    @property
    def welcome(self) -> Welcome | None:
        """The last WELCOME."""
        return self._session.welcome

    # --- what the user wants ------------------------------------------------------------------

    def dial(self, now_ns: int) -> list[Effect]:
        """Connect, if there is neither a session nor an attempt at one."""
        return self._dial(now_ns) if self._session.phase is Phase.DOWN else []

    def call(self, message: CallMessage, timeout_ms: int, now_ns: int) -> list[Effect]:
        """Send a request with one answer; ends in Answered or Failed."""
        if (refusal := self._refusal()) is not None:
            return [Failed(call_key(message), refusal)]
        self._calls.add(message, timeout_ms, now_ns)
        self._due_by(self._calls.next_ns())
        if self._session.open and not self._put_off(message):
            self._calls.sent(message)
            self._send(message, now_ns)
        return self.dial(now_ns)

    def decode(self, message: Decode, answer_ms: int, now_ns: int) -> list[Effect]:
        """Start a job; gives Queued, News, Output … and ends in Finished or Failed."""
        if (refusal := self._refusal()) is not None:
            return [Failed(message.rid, refusal)]
        job = self._jobs[message.rid] = Job(message, answer_ms, self._timing)
        if self._put_off(message):
            job.put_off(now_ns)
            self._due_by(job.next_ns())
        elif self._session.open:
            self._send_job(job, now_ns)
        return [*self._drain(job, now_ns), *self.dial(now_ns)]

    def want(self, rid: bytes, pieces: int | None, now_ns: int) -> list[Effect]:
        """The reader of a job with a window can take so many pieces more (None: all)."""
        job = self._jobs.get(rid)
        if job is None:
            return []
        job.want(pieces)
        return self._drain(job, now_ns)

    def cancel(self, rid: bytes, now_ns: int) -> list[Effect]:
        """Cancel a job; it still ends, as a rule in Finished with what there was. Idempotent."""
        job = self._jobs.get(rid)
        if job is None:
            return []
        if job.sent_epoch is None:
            job.end_here(Usage(stop_reason="cancelled"))
        self._send_if_open(job.cancel(now_ns), now_ns)
        self._due_by(job.next_ns())
        return self._drain(job, now_ns)

    def forget(self, key: bytes, now_ns: int) -> list[Effect]:
        """Nobody waits for the answer of this call any more."""
        self._send_if_open(self._calls.drop(key), now_ns)
        return []

    def close(self) -> list[Effect]:
        """Say BYE and fail whatever still runs. The last thing to be called."""
        was_open = self._session.open
        self._session.phase = Phase.CLOSED
        self.outgoing.clear()
        error = Cancelled("closed", "the Conductor was closed before the answer came")
        effects = self._fail_all(error, Job.closed, 0)
        self._due_ns = None
        self.outgoing.extend([Bye()] if was_open else [])
        return effects

    # --- what happened ------------------------------------------------------------------------

    def handle(self, message: BrokerMessage, now_ns: int) -> list[Effect]:
        """A message of the broker. Never raises for what it says."""
        self._session.heard(now_ns)
        if isinstance(message, Welcome):
            return self._welcomed(message, now_ns)
        if isinstance(message, Error) and message.error.reason == "no_session":
            return self.lost(now_ns) if self._session.open else []
        if isinstance(message, Error) and not message.rid:
            return self._session_error(error_from_info(message.error), now_ns)
        if not self._session.open:
            return []
        if isinstance(message, GoAway):
            self._session.goaway = message
            return []
        if not isinstance(message, Pong) and (job := self._jobs.get(message.rid)) is not None:
            if isinstance(message, Ok):
                return [Warn("ignored OK as the answer to a DECODE")]
            effects = job.handle(message, now_ns)
            if isinstance(message, Error):
                self._due_by(job.next_ns())
            return [*effects, *self._drain(job, now_ns)]
        if isinstance(message, Ok | Error | Pong | Progress):
            return [*self._calls.answered(message, now_ns)]
        return []

    def bad(self, error: ConductorError, now_ns: int) -> list[Effect]:
        """Undecodable frames came. A broker of another major version ends the attempt."""
        if isinstance(error, Unimplemented) and self._session.phase is Phase.DIALLING:
            return self._session_error(error, now_ns)
        return [Warn(f"ignored a message of the broker: {error}")]

    def lost(self, now_ns: int, suspect: ConductorError | None = None) -> list[Effect]:
        """The connection is gone (or the session, or the broker's sense of it)."""
        if self._session.phase is Phase.DIALLING:
            self._session.broke(now_ns, suspect)
            return []
        return self._dial(now_ns) if self._session.open else []

    def tick(self, now_ns: int) -> list[Effect]:
        """Time passed; due at :meth:`next_ns`, harmless at any other time."""
        effects: list[Effect] = []
        session = self._session
        if session.expired(now_ns):
            effects += self._gave_up(now_ns)
        elif session.redial_due(now_ns):
            self.outgoing.clear()
            self.outgoing.append(session.hello())
            effects.append(Connect())
        elif session.open and session.dead(now_ns):
            effects += self._dial(now_ns)
        elif session.ping_due(now_ns):
            self.outgoing.append(Ping())
        if self._due_ns is not None and now_ns >= self._due_ns:
            effects += self._tick_requests(now_ns)
        return effects

    def next_ns(self) -> int | None:
        """When to call :meth:`tick` at the latest; None: nothing waits for time to pass."""
        times = (self._due_ns, self._session.next_ns())
        return min((time for time in times if time is not None), default=None)

    # --- inside -------------------------------------------------------------------------------

    def _dial(self, now_ns: int) -> list[Effect]:
        self._session.dial(now_ns)
        for job in self._jobs.values():
            job.pause()
        self.outgoing.clear()
        self.outgoing.append(self._session.hello())
        return [Connect()]

    def _welcomed(self, message: Welcome, now_ns: int) -> list[Effect]:
        if self._session.phase is not Phase.DIALLING:
            return []
        if (refusal := self._session.opened(message, now_ns)) is not None:
            return self._session_error(refusal, now_ns)
        effects: list[Effect] = [Opened(message.session, message.broker_epoch)]
        for call in self._calls.again():
            self._send(call, now_ns)
        for job in list(self._jobs.values()):
            if job.sent_epoch in (None, message.broker_epoch):
                self._send_job(job, now_ns)
            else:
                text = "the broker was restarted while this job ran; check the conversation's "
                text += "version and send the job again"
                job.give_up(job.lost("broker_restarted", text))
            effects += self._drain(job, now_ns)
        return effects

    def _session_error(self, error: ConductorError, now_ns: int) -> list[Effect]:
        """ERROR without a ``rid``: in an attempt to connect it means no."""
        if not self._session.ended_by(error):
            return [Warn(f"the broker says: {error}")] if self._session.open else []
        self._session.phase = Phase.DOWN
        return [*self._fail_all(error, lambda job: error, now_ns), Down(error)]

    def _gave_up(self, now_ns: int) -> list[Effect]:
        error = self._session.gave_up()

        def job_error(job: Job) -> ConductorError:
            never_sent = job.sent_epoch is None
            return error if never_sent else job.lost("connection_lost", error.info.message)

        return [*self._fail_all(error, job_error, now_ns), Down(error)]

    def _fail_all(
        self, error: ConductorError, job_error: Callable[[Job], ConductorError], now_ns: int
    ) -> list[Effect]:
        effects: list[Effect] = [*self._calls.fail(error)]
        for job in list(self._jobs.values()):
            job.give_up(job_error(job))
            effects += self._drain(job, now_ns)
        return effects

    def _tick_requests(self, now_ns: int) -> list[Effect]:
        session = self._session
        failed, withdrawals = self._calls.tick(
            now_ns, None if session.open else session.no_broker()
        )
        self._send_if_open(withdrawals, now_ns)
        effects: list[Effect] = [*failed]
        times = [self._calls.next_ns()]
        for job in list(self._jobs.values()):
            self._send_if_open(job.tick(now_ns), now_ns)
            effects += self._drain(job, now_ns)
            times.append(None if job.over else job.next_ns())
        self._due_ns = min((time for time in times if time is not None), default=None)
        return effects

    def _drain(self, job: Job, now_ns: int) -> list[Effect]:
        outputs, requests = job.drain()
        if job.over:
            self._jobs.pop(job.rid, None)
        self._send_if_open(requests, now_ns)
        return [*outputs]

    def _refusal(self) -> ConductorError | None:
        """Why no request can even be sent."""
        if self._session.phase is Phase.CLOSED:
            return Cancelled("closed", "this Conductor is closed; make a new one")
        return None

    def _put_off(self, message: CallMessage | Decode) -> bool:
        """A broker that leaves takes nothing new: the next one is asked."""
        return self._session.goaway is not None and isinstance(message, Decode | Register)

    def _send_job(self, job: Job, now_ns: int) -> None:
        assert self._session.welcome is not None
        for request in job.send(self._session.welcome, now_ns):
            self._send(request, now_ns)
        self._due_by(job.next_ns())

    def _send_if_open(self, messages: Sequence[ClientMessage], now_ns: int) -> None:
        """Without a session they are made up for by what is sent after the next WELCOME."""
        for message in messages if self._session.open else ():
            self._send(message, now_ns)

    def _send(self, message: ClientMessage, now_ns: int) -> None:
        self.outgoing.append(message)
        self._session.sent(now_ns)

    def _due_by(self, time_ns: int | None) -> None:
        if time_ns is not None:
            self._due_ns = time_ns if self._due_ns is None else min(self._due_ns, time_ns)
