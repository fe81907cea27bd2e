"""What clients ask about jobs (*pure*): DECODE, CREDIT, CANCEL, RESUME."""

from __future__ import annotations

import msgspec

from vram_conductor.broker.agents.reload import Reload
from vram_conductor.broker.conversations.opening import open_at
from vram_conductor.broker.errors import (
    cancelled_error,
    client_gone_error,
    draining_error,
    orphaned_error,
    queue_timeout_error,
    timeout_error,
)
from vram_conductor.broker.jobs.attempts import Attempts
from vram_conductor.broker.jobs.delivery import Delivery
from vram_conductor.broker.jobs.job import Job, wait_ns
from vram_conductor.broker.permissions import check_quota, quota_of
from vram_conductor.broker.registry import Agent, Conversation
from vram_conductor.broker.sessions import Leave, Session, orphan_ms
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.absence import no_worker
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import (
    AlreadyExists,
    ErrorInfo,
    NotFound,
    OutOfRange,
    error_from_info,
)
from vram_conductor.protocol.ids import body_digest
from vram_conductor.protocol.messages import Accepted, Credit, Decode, Resume
from vram_conductor.protocol.stream import SendStream
from vram_conductor.protocol.values import AgentKey

_GUESS_MS = 1_000
"""Length of a job on a device that has not finished one yet."""

_RUN_EXTRA_BYTES = 16 * 1024
"""Room for what RUN has beyond DECODE: names, defaults, numbers."""


class JobDesk:
    """Accepts jobs and answers for them until they are forgotten."""

    def __init__(
        self, state: State, delivery: Delivery, attempts: Attempts, reload: Reload
    ) -> None:
        self._state = state
        self._delivery = delivery
        self._attempts = attempts
        self._reload = reload

    def decode(self, session: Session, message: Decode) -> None:
        """Queue a job, or re-attach to it if it is here already.

        Raises a ConductorError; nothing has changed then.
        """
        size_bytes = _size(message)
        digest = body_digest(message)
        known = self._state.jobs.by_rid(session.principal, message.rid)
        if known is not None:
            if known.digest != digest:
                raise AlreadyExists(
                    "rid_reused",
                    "this rid belongs to another request; use a fresh rid for every request",
                    job=known.number,
                )
            self._reattach(session, known, 0, message.window)
            return
        agent = self._state.registry.get(AgentKey(session.principal, message.agent))
        device = self._check_agent(agent)
        self._state.queue.check_room(agent.key, size_bytes, self._retry_after_ms(device))
        self._check_quota(agent.key.principal, self._retry_after_ms(device))
        conversation = open_at(self._state, agent, message.conversation)
        self._accept(
            session,
            agent,
            device,
            conversation,
            self._new_job(agent, conversation, message, size_bytes, digest),
        )
        if agent.state == "suspended":
            self._reload.begin(agent)  # the job waits for it; it ends with what comes of that

    def _new_job(
        self,
        agent: Agent,
        conversation: Conversation,
        message: Decode,
        size_bytes: int,
        digest: bytes,
    ) -> Job:
        now_ns = self._state.now_ns
        return Job(
            job=self._state.jobs.next_number(),
            rid=message.rid,
            principal=agent.key.principal,
            key=conversation.key,
            device=agent.device,
            priority=agent.spec.priority if message.priority is None else message.priority,
            message=message,
            size_bytes=size_bytes,
            digest=digest,
            stream=SendStream(message.window),
            peer=None,
            detach=message.detach,
            received_ns=now_ns,
            queue_deadline_ns=wait_ns(now_ns, message.queue_ms),
            deadline_ns=wait_ns(now_ns, message.timeout_ms),
        )

    def _accept(
        self,
        session: Session,
        agent: Agent,
        device: Device,
        conversation: Conversation,
        job: Job,
    ) -> None:
        """Queue the job and say what is ahead of it."""
        state = self._state
        waiting = state.queue.waiting(device.id)
        ahead = waiting + (len(device.link.runs) if device.link else 0)
        state.jobs.add(job)
        state.queue.push(job)
        conversation.queued += 1
        state.used(agent)
        self._delivery.attach(job, session)
        if job.queue_deadline_ns is not None:
            state.timers.set(("queue", job.job), job.queue_deadline_ns)
        if job.deadline_ns is not None:
            state.timers.set(("deadline", job.job), job.deadline_ns)
        est_ms = None if device.job_ms is None else round(device.job_ms * ahead)
        state.to_client(
            session.peer, Accepted(rid=job.rid, job=job.number, position=ahead, est_ms=est_ms)
        )
        state.dispatch_due.add(device.id)

    def resume(self, session: Session, message: Resume) -> None:
        """Raises NotFound ``unknown_rid``, OutOfRange ``resume_out_of_range``."""
        job = self._get(session, message.rid)
        self._reattach(session, job, message.from_seq, message.window)

    def credit(self, session: Session, message: Credit) -> None:
        """More may be sent. For a job that is not known any more it means nothing."""
        job = self._state.jobs.by_rid(session.principal, message.rid)
        if job is not None and job.peer == session.peer:
            job.stream.credit(message.upto)
            self._delivery.pump(job)

    def cancel(self, session: Session, rid: bytes) -> None:
        """Stop a job; its terminal message follows. A job that is over stays as it is.

        Raises NotFound ``unknown_rid``.
        """
        job = self._get(session, rid)
        self._attempts.stop(job, cancelled_error())

    def client_left(self, session: Session, how: Leave) -> None:
        """The session has ended: what nobody waits for is dropped or, if it runs, stopped; where
        the client may come back, its jobs have a while to be resumed."""
        wait_ms = orphan_ms(self._state.config.broker, how)
        for number in sorted(session.jobs):
            job = self._state.jobs.find(number)
            if job is None:
                continue
            self._delivery.detach(job)
            job.peer = None
            if job.detach or job.state == "ended":
                continue
            if wait_ms == 0:
                self._attempts.stop(job, client_gone_error())
            else:
                self._state.timers.set(("orphan", job.job), self._state.in_ms(wait_ms))

    def expire(self, what: str, number: int) -> None:
        """The timer ``what`` of a job has run out."""
        job = self._state.jobs.find(number)
        if job is None:
            return
        if what == "queue" and job.state in ("queued", "sent"):
            self._attempts.stop(job, queue_timeout_error())
        elif what == "deadline":
            self._attempts.stop(job, timeout_error())
        elif what == "orphan":
            started = job.first_token_ns is not None
            self._attempts.stop(job, orphaned_error() if started else client_gone_error())
        elif what == "stop":
            self._attempts.give_up(job)

    def fail_waiting(self, device: str, error: ErrorInfo, agent: AgentKey | None = None) -> None:
        """End the queued jobs of a device, or of one of its agents."""
        for job in list(self._state.queue):
            if job.device == device and agent in (None, job.key.agent_key):
                self._attempts.stop(job, error)

    def _get(self, session: Session, rid: bytes) -> Job:
        job = self._state.jobs.by_rid(session.principal, rid)
        if job is None:
            keep_s = self._state.config.broker.result_keep_ms // 1000
            raise NotFound(
                "unknown_rid",
                f"no job with this rid: it was never accepted, its result is older than {keep_s} "
                "s, or the broker was restarted; look at the conversation's version, then resend",
            )
        return job

    def _reattach(self, session: Session, job: Job, from_seq: int, window: int | None) -> None:
        job.stream.resume(from_seq, window)
        self._delivery.attach(job, session)
        if job.state != "ended":
            self._state.dispatch_due.add(job.device)
            self._state.to_client(session.peer, Accepted(rid=job.rid, job=job.number, position=0))
        self._delivery.pump(job)

    def _check_agent(self, agent: Agent) -> Device:
        """The agent's device, if jobs can be accepted for it.

        Raises Unavailable ``draining``, ``no_worker``, or why the agent is suspended where
        another try is not due.
        """
        state = self._state
        if state.draining:
            raise error_from_info(draining_error())
        if agent.reason is not None and not self._reload.may_try(agent):
            raise error_from_info(agent.reason)
        device = state.devices[agent.device]
        if device.link is None and state.now_ns >= device.patient_until_ns:
            raise error_from_info(no_worker(state, device.id))
        return device

    def _check_quota(self, principal: str, retry_after_ms: int) -> None:
        """Raises ResourceExhausted ``quota_exceeded``."""
        most = quota_of(self._state, principal).queued_jobs
        if most is not None:
            waiting = self._state.queue.count_of(principal)
            check_quota(principal, "queued_jobs", waiting, 1, most, retry_after_ms)

    def _retry_after_ms(self, device: Device) -> int:
        """When a place in the queue is likely to be free: about one job's time."""
        return min(60_000, max(50, round(device.job_ms or _GUESS_MS)))


def _size(message: Decode) -> int:
    """Bytes of the request on the wire.

    Raises OutOfRange ``limit_exceeded``: RUN, which repeats it and says a little more, would not
    fit into a message any more.
    """
    size_bytes = len(msgspec.msgpack.encode(message))
    limit = limits.MAP_BYTES_MAX - _RUN_EXTRA_BYTES
    if size_bytes > limit:
        raise OutOfRange(
            "limit_exceeded",
            f"the request has {size_bytes} bytes, the limit is {limit}; shorten the prompt, or "
            "send it in parts with continue",
            field="map_bytes",
            value=size_bytes,
            limit=limit,
        )
    return size_bytes
