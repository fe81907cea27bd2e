"""What clients ask about leases (*pure*): LEASE, which grants, renews and releases."""

from __future__ import annotations

import msgspec

from vram_conductor.broker.agents.lobby import check_waiters
from vram_conductor.broker.errors import cancelled_error, draining_error
from vram_conductor.broker.journal.records import LeaseEnded, LeaseHeld
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.broker.leases.granting import Granting
from vram_conductor.broker.leases.tenure import NS_PER_S, Tenure
from vram_conductor.broker.ledger import refusal
from vram_conductor.broker.ledger.decisions import Deny, LeaseKey
from vram_conductor.broker.permissions import check_quota, held_bytes, quota_of
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.absence import no_worker
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import (
    AlreadyExists,
    Code,
    ErrorInfo,
    NotFound,
    ResourceExhausted,
    error_from_info,
)
from vram_conductor.protocol.messages import Lease, Ok


class LeaseDesk:
    """Answers for leases. ``lease`` raises a ConductorError with nothing changed, or sees to it
    that OK or ERROR follows for the message's rid."""

    def __init__(self, state: State, commander: Commander) -> None:
        self._state = state
        self._commander = commander
        self.granting = Granting(state, commander, self._held)

    def lease(self, session: Session, message: Lease) -> None:
        """Grant, renew or release."""
        state = self._state
        key = LeaseKey(message.principal or session.principal, message.name)
        tenure = state.leases.get(key)
        if tenure is not None and tenure.is_over(state.now_ns):
            # Its timer is due in this very moment, and this message came first.
            self._end(tenure, "expired")
            tenure = None
        if message.ends:
            self._release(session, message, tenure)
        elif state.draining:
            raise error_from_info(draining_error())
        elif tenure is None:
            self._grant(session, message, key)
        else:
            self._again(session, message, tenure)

    def cancel(self, principal: str, rid: bytes) -> bool:
        """CANCEL of a LEASE without an answer. False if none of the principal's has the rid."""
        for tenure in list(self._state.leases.values()):
            mine = [who for who in tenure.waiters if who[1] == rid]
            if tenure.key.principal != principal or not mine:
                continue
            for who in mine:
                del tenure.waiters[who]
                self._state.fail(*who, cancelled_error())
            self._unwanted(tenure)
            return True
        return False

    def client_left(self, peer: bytes, keys: set[LeaseKey]) -> None:
        """A session has ended. ``keys``: the ephemeral leases that it kept alive."""
        for tenure in list(self._state.leases.values()):
            for who in [who for who in tenure.waiters if who[0] == peer]:
                del tenure.waiters[who]
            if tenure.key in keys:
                tenure.owners.discard(peer)
                if not tenure.owners and tenure.expires_ns is not None:
                    self._end(tenure, "session_ended")
            self._unwanted(tenure)

    def expire(self, key: LeaseKey) -> None:
        """The timer of a held lease."""
        self._end(self._state.leases[key], "expired")

    def expire_wait(self, key: LeaseKey) -> None:
        """The timer of a pending lease."""
        self.granting.expire(self._state.leases[key])

    def end_pending(self, error: ErrorInfo) -> None:
        """The broker is leaving: nobody gets a lease any more."""
        for tenure in list(self._state.leases.values()):
            self.granting.withdraw(tenure, error)

    def restore(self, restored: Restored) -> None:
        """Leases of the journal go on with what is left of their time; those whose time is over
        end with the first tick."""
        state = self._state
        for record in restored.leases.values():
            device = state.devices.get(record.device)
            if device is None or not state.serves(device.id):
                continue
            key = LeaseKey(record.principal, record.name)
            most_ns = record.ttl_s * NS_PER_S
            # A clock that was set back must not make it longer.
            left_ns = min(max(1, record.ends_unix_ns - state.unix_ns()), most_ns)
            device.ledger.restore_lease(key, record.bytes, left_ns, state.now_ns, park=record.park)
            state.leases[key] = Tenure(
                key,
                device.id,
                record.bytes,
                record.ttl_s,
                record.park,
                ephemeral=False,
                since_ns=state.now_ns,
                expires_ns=state.now_ns + left_ns,
            )
            state.timers.set(("lease", key), state.now_ns + left_ns)

    # --- ways -----------------------------------------------------------------------------------

    def _grant(self, session: Session, message: Lease, key: LeaseKey) -> None:
        state = self._state
        self._check_count(key.principal)
        self._check_quota(key.principal, message.lease_bytes)
        device = self._device(message)
        answer = device.ledger.grant_lease(
            key, message.lease_bytes, state.now_ns, park=message.park
        )
        if isinstance(answer, Deny):
            raise error_from_info(refusal.error(answer, key.principal))
        tenure = state.leases[key] = Tenure(
            key,
            device.id,
            message.lease_bytes,
            message.ttl_s,
            message.park,
            message.ephemeral,
            state.now_ns,
        )
        tenure.waiters[session.peer, message.rid] = None
        self._own(session, tenure)
        state.log("info", "lease_asked", lease=str(key), device=device.id, bytes=tenure.size_bytes)
        self.granting.begin(tenure)

    def _again(self, session: Session, message: Lease, tenure: Tenure) -> None:
        differences = tenure.differences(message)
        if differences:
            raise AlreadyExists(
                "lease_exists",
                f"there is a lease {message.name!r} of {tenure.size_bytes} bytes on "
                f"{tenure.device} already, and it differs in {', '.join(differences)}; release "
                "it first, or choose another name",
                differences=differences,
                device=tenure.device,
                bytes=tenure.size_bytes,
            )
        who = session.peer, message.rid
        if tenure.expires_ns is None and who not in tenure.waiters:
            check_waiters(f"lease {message.name!r}", len(tenure.waiters))
            tenure.waiters[who] = None
        self._own(session, tenure)
        tenure.ttl_s = message.ttl_s
        if tenure.expires_ns is not None:
            self._held(tenure)
            body = msgspec.to_builtins(tenure.status(self._state.now_ns))
            self._state.to_client(session.peer, Ok(rid=message.rid, body=body))

    def _release(self, session: Session, message: Lease, tenure: Tenure | None) -> None:
        if tenure is None:
            raise NotFound(
                "no_such_lease",
                f"there is no lease {message.name!r} (any more)",
                lease=message.name,
            )
        if tenure.expires_ns is None:
            self.granting.withdraw(
                tenure,
                ErrorInfo(
                    Code.CANCELLED,
                    "lease_released",
                    f"lease {message.name!r} was released while room was made for it",
                ),
            )
        else:
            self._end(tenure, "released")
        self._state.to_client(session.peer, Ok(rid=message.rid))

    def _held(self, tenure: Tenure) -> None:
        """From now on, for its ttl."""
        state = self._state
        ledger = state.devices[tenure.device].ledger
        held = ledger.hold_lease(tenure.key, tenure.ttl_ns, state.now_ns)
        assert held is not None
        tenure.expires_ns = held.expires_ns
        assert tenure.expires_ns is not None
        state.timers.set(("lease", tenure.key), tenure.expires_ns)
        if not tenure.ephemeral:
            state.append(
                LeaseHeld(
                    principal=tenure.key.principal,
                    name=tenure.key.name,
                    device=tenure.device,
                    bytes=tenure.size_bytes,
                    ttl_s=tenure.ttl_s,
                    park=tenure.park,
                    ends_unix_ns=state.unix_ns() + tenure.ttl_ns,
                )
            )
        state.log("info", "lease_held", lease=str(tenure.key), ttl_s=tenure.ttl_s)

    def _end(self, tenure: Tenure, why: str) -> None:
        """A held lease is over: its bytes are the worker's again."""
        state, key = self._state, tenure.key
        device = state.devices[tenure.device]
        state.forget_lease(tenure)
        state.timers.cancel(("lease", key))
        device.ledger.release_lease(key)
        if not tenure.ephemeral:
            state.append(LeaseEnded(principal=key.principal, name=key.name))
        state.log("info", "lease_ended", lease=str(key), why=why)
        self._commander.send_budget(device)

    # --- parts --------------------------------------------------------------------------------

    def _unwanted(self, tenure: Tenure) -> None:
        """Nobody waits for a pending lease any more."""
        if tenure.expires_ns is None and not tenure.waiters:
            self.granting.withdraw(tenure, cancelled_error())

    def _own(self, session: Session, tenure: Tenure) -> None:
        if tenure.ephemeral:
            tenure.owners.add(session.peer)
            session.leases.add(tenure.key)

    def _check_count(self, principal: str) -> None:
        leases = self._state.leases
        mine = sum(key.principal == principal for key in leases)
        for what, count, limit in (
            ("you have", mine, limits.LEASES_PER_PRINCIPAL_MAX),
            ("the broker has", len(leases), limits.LEASES_MAX),
        ):
            if count >= limit:
                raise ResourceExhausted(
                    "too_many_leases",
                    f"{what} {count} leases, the limit is {limit}; release one, or wait until "
                    "one ends",
                    retryable=True,
                    leases=count,
                    limit=limit,
                )

    def _check_quota(self, principal: str, more_bytes: int) -> None:
        most = quota_of(self._state, principal).vram_bytes
        if most is not None:
            held = held_bytes(self._state, principal)[0]
            check_quota(principal, "vram_bytes", held, more_bytes, most)

    def _device(self, message: Lease) -> Device:
        """The wanted device, or the one where the most is left beside agents and leases."""
        state = self._state
        names = sorted(name for name in state.devices if state.serves(name))
        if message.device is not None:
            if message.device not in names:
                raise NotFound(
                    "no_such_device",
                    f"there is no device {message.device!r}; known: {', '.join(names) or 'none'}",
                    device=message.device,
                    devices=names,
                )
            names = [message.device]
        ready = [state.devices[name] for name in names if state.devices[name].ready]
        if not ready:
            raise error_from_info(no_worker(state, *names))

        def rank(device: Device) -> tuple[bool, int]:
            ledger = device.ledger
            least = ledger.room_bytes - ledger.base_bytes
            return least >= message.lease_bytes, ledger.room_bytes - ledger.agents_bytes

        return max(ready, key=rank)
