"""From the queue to the worker (*pure*): which job leaves, checked once more, as RUN."""

from __future__ import annotations

from vram_conductor.broker.errors import (
    queue_timeout_error,
    timeout_error,
    transcript_error,
    version_error,
)
from vram_conductor.broker.jobs.attempts import Attempts
from vram_conductor.broker.jobs.ending import Ending
from vram_conductor.broker.jobs.hindrance import shut_out
from vram_conductor.broker.jobs.job import Attempt, Job
from vram_conductor.broker.registry import Agent, Conversation
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import WorkerLink
from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.structure import FEATURE, no_structure
from vram_conductor.protocol.values import SAMPLING_DEFAULTS

SENT_MAX = 2
"""Times ``worker_inflight``: most jobs at a worker, those included that it cannot run now."""


class Dispatcher:
    """Keeps every worker as full as ``worker_inflight`` allows; the worker orders what it has."""

    def __init__(
        self, state: State, commander: Commander, attempts: Attempts, ending: Ending
    ) -> None:
        self._state = state
        self._commander = commander
        self._attempts = attempts
        self._ending = ending

    def dispatch(self, device: Device) -> None:
        """Send what can be sent."""
        state = self._state
        link = device.link
        if link is None or link.draining or link.away_ns is not None or state.draining:
            return
        while self._has_room(device, link):
            job = state.queue.next(device.id, self._ready, state.now_ns)
            if job is None:
                return
            agent = state.registry.get(job.key.agent_key)
            conversation = agent.conversations[job.key.conversation]
            error = self._refusal(job, conversation, link)
            if error is not None:
                self._ending.error(job, error)
                continue
            state.queue.remove(job)
            conversation.queued -= 1
            self._run(device, job, agent, conversation)

    def _has_room(self, device: Device, link: WorkerLink) -> bool:
        """Jobs that were sent and then shut out by a lease must not keep those out that fit; but
        they are not let pile up at the worker either."""
        most = self._state.config.broker.worker_inflight
        there = len(link.runs) + len(link.stopped)
        if there < most:
            return True
        if there >= SENT_MAX * most:
            return False
        jobs = [self._state.jobs.find(number) for number in link.runs]
        open_jobs = [job for job in jobs if job and not shut_out(device, job.key.agent_key)]
        return len(open_jobs) + len(link.stopped) < most

    def _ready(self, job: Job) -> bool:
        agent = self._state.registry.get(job.key.agent_key)
        conversation = agent.conversations[job.key.conversation]
        if agent.state != "ready" or conversation.running is not None:
            return False
        if job.peer is None and not job.detach:
            return False  # its client may never come back
        device = self._state.devices[job.device]
        if device.link is not None and job.key in device.link.stopped:
            return False
        # At the worker it would take the place of a job that fits.
        return not shut_out(device, agent.key)

    def _refusal(self, job: Job, conversation: Conversation, link: WorkerLink) -> ErrorInfo | None:
        """What has changed since the job was accepted."""
        now_ns = self._state.now_ns
        if job.deadline_ns is not None and now_ns >= job.deadline_ns:
            return timeout_error()
        if (
            job.started_ns is None
            and job.queue_deadline_ns is not None
            and now_ns >= job.queue_deadline_ns
        ):
            return queue_timeout_error()
        if len(conversation.transcript) > limits.FRAME_BYTES_MAX:
            return transcript_error(conversation.tokens)
        assert job.message is not None
        if job.message.structured and FEATURE not in link.ready.features:
            return no_structure(f"the worker of {job.device}").info
        expected = job.message.expect_version
        if expected is not None and expected != conversation.version:
            return version_error(job.key.conversation, expected, conversation.version)
        return None

    def _run(self, device: Device, job: Job, agent: Agent, conversation: Conversation) -> None:
        link = device.link
        request = job.message
        assert link is not None
        assert request is not None
        known = link.known.get(job.key) == conversation.version
        attempt = Attempt(op=0, version=conversation.version, known=known)
        deadline_ns = job.deadline_ns
        timeout_ms = None
        if deadline_ns is not None:
            timeout_ms = max(1, (deadline_ns - self._state.now_ns) // MS)
        job.attempt, job.state = attempt, "sent"
        conversation.running = job.job
        link.runs.add(job.job)
        attempt.op = self._commander.send(
            device,
            lambda epoch, op: Run(
                broker_epoch=epoch,
                op=op,
                job=job.number,
                conversation=job.key,
                version=conversation.version,
                transcript_tokens=conversation.tokens,
                n_raw=0 if known else 1,
                continue_=request.continue_,
                messages=request.messages,
                prompt=request.prompt,
                tokens=request.tokens,
                max_tokens=request.max_tokens,
                sampling=request.sampling.over(agent.spec.sampling).over(SAMPLING_DEFAULTS),
                stop=request.stop,
                grammar=request.grammar,
                json_schema=request.json_schema,
                logit_bias=request.logit_bias,
                timeout_ms=timeout_ms,
                priority=job.priority,
            ),
            on_reply=lambda message, raw: self._attempts.reply(job, message, raw),
            on_lost=lambda error: self._attempts.lost(job, error),
            raw=[] if known else [bytes(conversation.transcript)],
        )
