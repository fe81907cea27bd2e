"""How a job ends (*pure*): what it produced becomes the record, its client gets the receipt.

The only place that sets a job's terminal message and the only one that commits a transcript.
"""

from __future__ import annotations

import msgspec

from vram_conductor.broker.conversations.said import said
from vram_conductor.broker.errors import DRAINING, draining_error
from vram_conductor.broker.jobs.delivery import Delivery
from vram_conductor.broker.jobs.job import Attempt, Job
from vram_conductor.broker.journal.records import ConversationCommitted
from vram_conductor.broker.journal.restored import ID_BYTES
from vram_conductor.broker.ledger.tenants import own_names
from vram_conductor.broker.registry import Agent, Conversation, drop_if_unused
from vram_conductor.broker.state import MS, State
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.messages import Done, Error
from vram_conductor.protocol.values import Usage


class Ending:
    """Ends jobs, whatever the reason."""

    def __init__(self, state: State, delivery: Delivery) -> None:
        self._state = state
        self._delivery = delivery

    def done(self, job: Job, usage: Usage) -> None:
        """The attempt finished."""
        version = self._commit(job, confirmed=usage.generated_tokens)
        device = self._state.devices.get(job.device)
        if device is not None and job.started_ns is not None:
            device.saw_job((self._state.now_ns - job.started_ns) / MS)
        full = self._receipt(job, usage, version)
        self._end(job, Done(rid=job.rid, seq=job.stream.produced, usage=full))

    def error(self, job: Job, error: ErrorInfo, usage: Usage | None = None) -> None:
        """The job failed or was stopped. Tokens that were generated stay in the record."""
        version = self._commit(job, confirmed=None)
        if usage is None and job.attempt is not None and job.attempt.generated:
            usage = Usage(generated_tokens=job.attempt.generated_tokens, stop_reason="cancelled")
        if error.reason == DRAINING and job.attempt is not None:
            error = draining_error(job.attempt.generated_tokens)
        full = None if usage is None else self._receipt(job, usage, version)
        self._end(job, Error(rid=job.rid, error=error, seq=job.stream.produced, usage=full))

    def _commit(self, job: Job, confirmed: int | None) -> int:
        """Write what the attempt generated into the record; returns the version.

        ``confirmed`` is how many tokens the worker says it generated: if that is what arrived
        here, the worker's own copy of the transcript is the same as ours.
        """
        conversation = self._state.registry.conversation(job.key)
        if conversation is None:
            return 0
        attempt = job.attempt
        if attempt is None:
            return conversation.version
        link = self._state.devices[job.device].link
        if attempt.generated:
            self._write(job, attempt, conversation)
        if link is not None:
            if confirmed == attempt.generated_tokens:
                link.known[job.key] = conversation.version
            else:
                link.known.pop(job.key, None)
        return conversation.version

    def _write(self, job: Job, attempt: Attempt, conversation: Conversation) -> None:
        assert job.message is not None
        ids = attempt.prompt + bytes(attempt.generated)
        prompt_end = attempt.keep + len(attempt.prompt) // ID_BYTES
        keep_turns, turns = said(
            conversation.turns,
            job.message,
            "".join(attempt.said),
            keep=attempt.keep,
            prompt_end=prompt_end,
            end=prompt_end + attempt.generated_tokens,
        )
        conversation.commit(attempt.keep, ids, keep_turns, turns)
        self._state.append(
            ConversationCommitted(
                conversation=job.key,
                version=conversation.version,
                keep=attempt.keep,
                ids=ids,
                keep_turns=keep_turns,
                turns=turns,
            )
        )

    def _receipt(self, job: Job, usage: Usage, version: int) -> Usage:
        def ms(moment_ns: int | None) -> float:
            return 0.0 if moment_ns is None else (moment_ns - job.received_ns) / MS

        evicted = own_names(usage.swap.evicted, job.principal)
        conversation = self._state.registry.conversation(job.key)
        reason = usage.reprefill_reason
        if conversation is not None and conversation.given_up:
            conversation.given_up = False
            reason = "kv_quota" if usage.reprefilled_tokens else reason
        return msgspec.structs.replace(
            usage,
            reprefill_reason=reason,
            swap=msgspec.structs.replace(usage.swap, evicted=evicted),
            state_version=version,
            queue_ms=ms(job.started_ns),
            ttft_ms=ms(job.first_token_ns),
            elapsed_ms=ms(self._state.now_ns),
        )

    def _end(self, job: Job, terminal: Done | Error) -> None:
        assert job.state != "ended"
        state = self._state
        agent = state.registry.find(job.key.agent_key)
        conversation = state.registry.conversation(job.key)
        if job.state == "queued":
            state.queue.remove(job)
        self._leave(job, agent, conversation)
        job.state, job.terminal, job.message, job.attempt = "ended", terminal, None, None
        for what in ("queue", "deadline", "orphan", "stop"):
            state.timers.cancel((what, job.job))
        job.stream.finish()
        for old in state.jobs.ended(job):
            self.forget(old)
        state.timers.set(("result", job.job), state.in_ms(state.config.broker.result_keep_ms))
        self._delivery.pump(job)
        state.dispatch_due.add(job.device)

    def _leave(self, job: Job, agent: Agent | None, conversation: Conversation | None) -> None:
        """Free the job's place in its conversation and at the worker."""
        link = self._state.devices[job.device].link
        if link is not None:
            link.runs.discard(job.job)
            if job.attempt is not None:
                link.ops.pop(job.attempt.op, None)
        if conversation is None or agent is None:
            return
        conversation.used_ns = self._state.now_ns
        if conversation.running == job.job:
            conversation.running = None
        elif job.state == "queued":
            conversation.queued -= 1
        self._state.used(agent)
        if drop_if_unused(agent, conversation) and link is not None:
            link.known.pop(job.key, None)

    def forget(self, job: Job) -> None:
        """The result cannot be fetched any more."""
        assert job.state == "ended"
        session = self._state.sessions.find(job.peer) if job.peer is not None else None
        if session is not None:
            session.jobs.discard(job.job)
        self._state.timers.cancel(("result", job.job))
        self._state.jobs.forget(job)
