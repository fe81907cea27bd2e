"""What comes back from a RUN (*pure*): started, tokens, done, failed, or the worker is lost."""

from __future__ import annotations

import msgspec

from vram_conductor.broker.errors import CANCELLED, cancelled_error, cut_off_error
from vram_conductor.broker.jobs.delivery import Delivery
from vram_conductor.broker.jobs.ending import Ending
from vram_conductor.broker.jobs.job import ATTEMPTS_MAX, Job
from vram_conductor.broker.jobs.unbegun import let_go
from vram_conductor.broker.journal.restored import ID_BYTES
from vram_conductor.broker.registry import Conversation
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol.commands import Failed, RunDone, RunTokens, Started
from vram_conductor.protocol.errors import Code, ConductorError, ErrorInfo
from vram_conductor.protocol.tokens import pack_tokens

TRANSCRIPT_MISSING = "transcript_missing"

STOP_GRACE_MS = 120_000
"""A worker that does not answer CANCEL_RUN for so long is not waited for any more. Larger than
the time after which a hung worker ends itself."""


class Attempts:
    """Turns the replies to a RUN into output, record and ending."""

    def __init__(
        self, state: State, commander: Commander, delivery: Delivery, ending: Ending
    ) -> None:
        self._state = state
        self._commander = commander
        self._delivery = delivery
        self._ending = ending

    def reply(self, job: Job, message: ReplyMessage, raw: list[bytes]) -> bool:
        """One reply to the job's attempt; True if the attempt is over."""
        match message:
            case RunTokens():
                return self._tokens(job, message)
            case Started():
                return self._started(job, message, raw)
            case RunDone():
                self._done(job, message)
                return True
            case Failed():
                self._failed(job, message)
                return True
            case _:
                return self._nonsense(job, f"{type(message).__name__} in answer to RUN")

    def stop(self, job: Job, error: ErrorInfo) -> None:
        """End a job early. At once, unless it runs: then the worker is asked, and its answer ends
        the job. The first reason counts. Idempotent."""
        if job.state == "ended":
            return
        if job.state != "running":
            attempt = job.attempt
            self.abandon(job, error)
            if attempt is not None:
                device = self._state.devices[job.device]
                let_go(self._state, device, job.key, attempt.op, STOP_GRACE_MS)
            return
        if job.stopping is None:
            job.stopping = error
        self._cancel(job)

    def abandon(self, job: Job, error: ErrorInfo) -> None:
        """End a job at once, without waiting for what the worker has to say."""
        if job.state == "ended":
            return
        if job.attempt is not None:
            self._commander.cancel_run(self._state.devices[job.device], job.attempt.op)
            self._forget_known(job)
        self._ending.error(job, error)

    def lost(self, job: Job, error: ErrorInfo) -> None:
        """The worker that had the attempt is gone, or leaves without finishing it: again from
        the start if nobody saw a token, else the end."""
        attempt = job.attempt
        if attempt is None:
            return
        job.lost += 1
        if job.stopping is not None:
            self._ending.error(job, job.stopping)
        elif job.lost < ATTEMPTS_MAX and not self._state.draining and job.stream.restart():
            self._requeue(job)
        else:
            self._ending.error(job, cut_off_error(error, attempt.generated_tokens, job.lost))

    # --- replies ------------------------------------------------------------------------------

    def _started(self, job: Job, message: Started, raw: list[bytes]) -> bool:
        conversation = self._state.registry.conversation(job.key)
        attempt = job.attempt
        assert attempt is not None
        assert conversation is not None
        if job.state == "running":
            return False
        prompt = raw[0] if raw else b""
        if message.n_raw != len(raw) or len(prompt) % ID_BYTES:
            return self._nonsense(job, "STARTED without the prompt's ids")
        if not 0 <= message.keep <= conversation.tokens:
            return self._nonsense(job, "STARTED keeps more than there is")
        attempt.keep, attempt.prompt = message.keep, prompt
        job.state = "running"
        if job.started_ns is None:
            job.started_ns = self._state.now_ns
        self._state.timers.cancel(("queue", job.job))
        return False

    def _tokens(self, job: Job, message: RunTokens) -> bool:
        attempt = job.attempt
        request = job.message
        assert attempt is not None
        assert request is not None
        if job.state != "running":
            return self._nonsense(job, "RUN_TOKENS before STARTED")
        try:
            attempt.generated += pack_tokens(message.ids)
        except ConductorError:
            return self._nonsense(job, "RUN_TOKENS with impossible ids")
        attempt.said.append(message.text)
        if job.first_token_ns is None:
            job.first_token_ns = self._state.now_ns
        ids = tuple(message.ids) if request.return_ids else ()
        if (message.text or ids) and not job.cut:
            if job.stream.append(message.text, ids):
                self._delivery.pump(job)
            else:
                job.cut = True
                self._cancel(job)
        return False

    def _done(self, job: Job, message: RunDone) -> None:
        attempt = job.attempt
        assert attempt is not None
        self._note_place(job, message)
        usage = message.usage
        stopping = job.stopping
        if usage.stop_reason != CANCELLED:
            self._ending.done(job, usage)
        elif job.cut:
            self._ending.done(job, msgspec.structs.replace(usage, stop_reason="length"))
        elif stopping is not None and stopping.code is Code.CANCELLED and attempt.generated:
            self._ending.done(job, usage)
        else:
            self._ending.error(job, stopping or cancelled_error(), usage)

    def _failed(self, job: Job, message: Failed) -> None:
        attempt = job.attempt
        assert attempt is not None
        error = message.error
        if error.reason == TRANSCRIPT_MISSING and attempt.known and job.state == "sent":
            self._forget_known(job)
            if job.stopping is None:
                self._requeue(job)
                return
        if job.stopping is not None and error.code is Code.CANCELLED:
            error = job.stopping
        self._ending.error(job, error, message.usage)

    def _nonsense(self, job: Job, what: str) -> bool:
        """The worker broke the protocol: this job fails, nothing else does."""
        self._log("worker_nonsense", job, what=what)
        self.abandon(
            job,
            ErrorInfo(
                Code.INTERNAL,
                "bad_worker_reply",
                f"the worker of {job.device} broke the protocol ({what}); "
                "are broker and worker of one version?",
                details={"device": job.device},
            ),
        )
        return True

    # --- parts --------------------------------------------------------------------------------

    def _cancel(self, job: Job) -> None:
        attempt = job.attempt
        assert attempt is not None
        if not attempt.cancelled:
            attempt.cancelled = True
            self._commander.cancel_run(self._state.devices[job.device], attempt.op)
            self._state.timers.set(("stop", job.job), self._state.in_ms(STOP_GRACE_MS))

    def give_up(self, job: Job) -> None:
        """The worker did not answer CANCEL_RUN."""
        if job.state != "ended" and job.attempt is not None:
            self._log("cancel_ignored", job)
            self.abandon(job, job.stopping or cancelled_error())

    def _log(self, event: str, job: Job, **more: str) -> None:
        whose, device = job.principal, job.device
        self._state.log("error", event, device=device, principal=whose, job=job.number, **more)

    def _requeue(self, job: Job) -> None:
        """Back to the head of its conversation's line; what the attempt produced is void."""
        state = self._state
        conversation = self._running_conversation(job)
        link = state.devices[job.device].link
        if link is not None:
            link.runs.discard(job.job)
        conversation.running = None
        conversation.queued += 1
        job.attempt, job.state = None, "queued"
        state.queue.push(job, front=True)
        if job.started_ns is None and job.queue_deadline_ns is not None:
            state.timers.set(("queue", job.job), job.queue_deadline_ns)
        state.dispatch_due.add(job.device)

    def _running_conversation(self, job: Job) -> Conversation:
        conversation = self._state.registry.conversation(job.key)
        assert conversation is not None
        assert conversation.running == job.job
        return conversation

    def _forget_known(self, job: Job) -> None:
        link = self._state.devices[job.device].link
        if link is not None:
            link.known.pop(job.key, None)

    def _note_place(self, job: Job, message: RunDone) -> None:
        device = self._state.devices[job.device]
        attempt = job.attempt
        assert attempt is not None
        tokens = attempt.keep + len(attempt.prompt) // ID_BYTES + attempt.generated_tokens
        device.note_place(job.key, message.where, tokens, message.parked_bytes)
