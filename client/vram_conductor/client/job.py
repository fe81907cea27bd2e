"""One DECODE as the client sees it (*pure*): its output, credit, deadlines and end."""

from __future__ import annotations

from vram_conductor.client.effects import (
    Failed,
    Finished,
    News,
    Output,
    Queued,
    RequestEffect,
)
from vram_conductor.client.session import DRAINING, MS, Timing
from vram_conductor.protocol.errors import (
    Cancelled,
    Code,
    ConductorError,
    DeadlineExceeded,
    Unavailable,
    error_from_info,
)
from vram_conductor.protocol.messages import (
    Accepted,
    Cancel,
    Credit,
    Decode,
    Done,
    Error,
    Progress,
    Resume,
    Tokens,
    Welcome,
)
from vram_conductor.protocol.stream import ReceiveStream
from vram_conductor.protocol.structure import FEATURE, no_structure
from vram_conductor.protocol.values import Usage

JobMessage = Accepted | Tokens | Done | Error | Progress
Request = Decode | Resume | Credit | Cancel


class Job:
    """State of one running reply.

    Output is given out as it arrives; with a ``window`` only as the reader asks for it
    (:meth:`want`), because giving it out is what earns the broker new credit.

    Args:
        decode: the request; ``decode.window`` is the window.
        answer_ms: how long the broker may take to accept it.
        timing: see :class:`Timing`.
    """

    def __init__(self, decode: Decode, answer_ms: int, timing: Timing) -> None:
        self.decode = decode
        self.sent_epoch: int | None = None
        """The broker that has, or may have, this job; None while it was never sent."""
        self.received_chars: int = 0
        self.cancelling: bool = False
        self._timing = timing
        self._answer_ms = answer_ms
        self._answer_ns: int | None = None
        self._finish_ns: int | None = None
        self._cancel_ns: int | None = None
        self._quiet_ns: int | None = None
        self._known = False
        self._end: Usage | ConductorError | None = None
        self._forced = False
        self._stream = ReceiveStream(decode.window)
        self._wanted: int | None = 0 if decode.window is not None else None

    @property
    def rid(self) -> bytes:
        return self.decode.rid

    @property
    def over(self) -> bool:
        """Its end and all of its output were given out."""
        return self._end is not None and (self._stream.complete or self._forced)

    def send(self, welcome: Welcome, now_ns: int) -> list[Request]:
        """What to send in a fresh session with a broker: the job itself, or, to a broker that has
        it, the wish to go on. Nothing to one that would ignore what the answer must look like:
        then it fails here."""
        if self.decode.structured and FEATURE not in welcome.features:
            self.give_up(no_structure("the broker"))
            return []
        self.sent_epoch = welcome.broker_epoch
        self._heard(now_ns)
        if self._finish_ns is None and self.decode.timeout_ms is not None:
            self._finish_ns = now_ns + (self.decode.timeout_ms + self._timing.grace_ms) * MS
        requests: list[Request]
        if self._known:
            requests = [self._resume()]
        else:
            self._answer_ns = now_ns + self._answer_ms * MS
            requests = [self.decode]
        if self.cancelling:
            requests.append(Cancel(rid=self.rid))
        return requests

    def want(self, pieces: int | None) -> None:
        """The reader can take so many pieces more; None: all that come."""
        if pieces is None or self._wanted is None:
            self._wanted = None
        else:
            self._wanted += pieces

    def cancel(self, now_ns: int) -> list[Request]:
        """Ask the broker to end it; what is still on the way is let in, so the end can come."""
        self.want(None)
        if self.cancelling or self._end is not None:
            return []
        self.cancelling = True
        self._cancel_ns = now_ns + self._timing.cancel_ms * MS
        return [Cancel(rid=self.rid)]

    def handle(self, message: JobMessage, now_ns: int) -> list[RequestEffect]:
        """A message of the broker about this job; :meth:`drain` gives out what it brought."""
        self._heard(now_ns)
        self._known, first = True, not self._known
        self._answer_ns = None
        if isinstance(message, Tokens):
            self._stream.offer(message.seq, message.text, tuple(message.ids))
        elif isinstance(message, Accepted) and first:
            return [Queued(self.rid, message.job, message.position, message.est_ms)]
        elif isinstance(message, Progress):
            return [News(self.rid, message.stage, message.done, message.total, message.note)]
        elif isinstance(message, Done):
            self._stream.end(message.seq)
            self._end = message.usage
        elif isinstance(message, Error) and self._not_begun(message):
            self.put_off(now_ns)
        elif isinstance(message, Error):
            self._stream.end(message.seq)
            self._end = self._ended_by(message)
        return []

    def drain(self) -> tuple[list[RequestEffect], list[Request]]:
        """Output that may be given out now, the end if it is reached, and what to send."""
        effects: list[RequestEffect] = []
        requests: list[Request] = []
        stream = self._stream
        while self._wanted != 0 and (piece := stream.take()) is not None:
            self._wanted = None if self._wanted is None else self._wanted - 1
            self.received_chars += len(piece.text)
            effects.append(Output(self.rid, piece.text, piece.ids))
        if self.over:
            effects.append(self._terminal())
            return effects, []
        if (credit := stream.credit_due()) is not None:
            requests.append(Credit(rid=self.rid, ack=credit.ack, upto=credit.upto))
        if (gap := stream.resume_due()) is not None:
            requests.append(Resume(rid=self.rid, from_seq=gap.from_seq, window=gap.window))
        return effects, requests

    def tick(self, now_ns: int) -> list[Request]:
        """Deadlines: ends the job here where one has passed; returns what to send."""
        if self._cancel_ns is not None and now_ns >= self._cancel_ns:
            self.end_here(Usage(stop_reason="cancelled"))
        elif self._answer_ns is not None and now_ns >= self._answer_ns:
            self.end_here(self._late("no_answer", self._answer_ms))
            return [Cancel(rid=self.rid)]
        elif self._finish_ns is not None and now_ns >= self._finish_ns:
            self.end_here(self._late("timeout", self.decode.timeout_ms or 0))
            return [Cancel(rid=self.rid)]
        elif self._known and self._quiet_ns is not None and now_ns >= self._quiet_ns:
            self._heard(now_ns)
            return [self._resume()]
        return []

    def next_ns(self) -> int | None:
        """When :meth:`tick` is due at the latest."""
        times = (self._answer_ns, self._finish_ns, self._cancel_ns, self._quiet_ns)
        return min((time for time in times if time is not None), default=None)

    def pause(self) -> None:
        """The session is gone: what the broker owes us counts again after :meth:`send`."""
        self._answer_ns = self._quiet_ns = None

    def put_off(self, now_ns: int) -> None:
        """The next broker gets it, as if it had never been sent. One that says that it leaves, and
        does not, is not waited for any longer than one that is silent."""
        self.sent_epoch, self._known = None, False
        self._answer_ns, self._quiet_ns = now_ns + self._answer_ms * MS, None

    def end_here(self, end: Usage | ConductorError) -> None:
        """It is over for this side; what arrived in order is still given out, then ``end``."""
        self.want(None)
        self._end = end
        self._forced = True

    def give_up(self, error: ConductorError) -> None:
        """:meth:`end_here` with an error, except for a reader who wanted it to end."""
        self.end_here(Usage(stop_reason="cancelled") if self.cancelling else error)

    def lost(self, reason: str, message: str) -> Unavailable:
        """The error for a job that this side has to give up."""
        return Unavailable(
            reason,
            f"{message} ({self._stream.received} pieces, {self.received_chars} characters of "
            "the reply had arrived)",
            retryable=True,
            received_pieces=self._stream.received,
            received_chars=self.received_chars,
        )

    def closed(self) -> Cancelled:
        """The error for a job whose Conductor was closed."""
        return Cancelled(
            "closed",
            "the Conductor was closed while this reply was running; read it to its end first",
            received_pieces=self._stream.received,
            received_chars=self.received_chars,
        )

    def _not_begun(self, message: Error) -> bool:
        """Whether a broker leaves without having begun it, and it may wait for the next one: not
        where somebody has said for how long."""
        generated = message.usage is not None and message.usage.generated_tokens > 0
        begun = generated or self._stream.received > 0
        given_up = self.cancelling or self.decode.queue_ms is not None
        return message.error.reason == DRAINING and not begun and not given_up

    def _resume(self) -> Resume:
        due = self._stream.resume()
        return Resume(rid=self.rid, from_seq=due.from_seq, window=due.window)

    def _heard(self, now_ns: int) -> None:
        self._quiet_ns = now_ns + self._timing.quiet_ms * MS

    def _terminal(self) -> RequestEffect:
        if isinstance(self._end, Usage):
            return Finished(self.rid, self._end)
        assert self._end is not None
        return Failed(self.rid, self._end)

    def _ended_by(self, message: Error) -> Usage | ConductorError:
        # Whoever cancels gets what there was, not an exception for his own wish.
        if self.cancelling and message.error.code is Code.CANCELLED:
            return message.usage or Usage(stop_reason="cancelled")
        return error_from_info(message.error)

    def _late(self, reason: str, waited_ms: int) -> DeadlineExceeded:
        what = "did not accept the job" if reason == "no_answer" else "did not finish the job"
        return DeadlineExceeded(
            reason,
            f"the broker {what} within {waited_ms} ms; look at `conductor status`",
            retryable=reason == "no_answer",
            waited_ms=waited_ms,
            received_pieces=self._stream.received,
            received_chars=self.received_chars,
        )
