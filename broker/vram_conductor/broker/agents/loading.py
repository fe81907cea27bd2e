"""LOAD and UNLOAD (*pure*): the commands that follow a change of the ledger."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.broker.errors import bad_reply_error
from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol.commands import Failed, Load, Loaded, Unload
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.values import AgentKey, KVType, ModelInfo

OnLoaded = Callable[[Loaded | ErrorInfo], None]


class Loading:
    """Commands are carried out in order, so bytes that an UNLOAD frees can be promised at once:
    the LOAD of whoever gets them comes behind it."""

    def __init__(self, state: State, commander: Commander) -> None:
        self._state = state
        self._commander = commander

    def load(
        self, device: Device, key: AgentKey, model: ModelInfo, spec: AgentSpec, on_done: OnLoaded
    ) -> int:
        """Load an agent that the ledger has (reserved or committed); returns the op."""
        claim = device.ledger.claim_of(key)
        assert claim is not None
        pool = device.ledger.pool(claim.model, claim.kv_type)
        assert pool is not None
        assert device.link is not None
        budget_bytes = device.link.budget_bytes = device.ledger.budget_bytes

        def reply(message: ReplyMessage, raw: list[bytes]) -> bool:
            match message:
                case Loaded():
                    on_done(message)
                case Failed():
                    on_done(message.error)
                case _:
                    on_done(bad_reply_error(device.id, message))
            return True

        return self._commander.send(
            device,
            lambda epoch, op: Load(
                broker_epoch=epoch,
                op=op,
                agent=key,
                model=claim.model,
                path=model.path,
                shape=pool.shape,
                n_ctx=claim.n_ctx,
                state_bytes=claim.state_bytes,
                weights_bytes=device.ledger.weights_bytes(claim.model) or 0,
                pool_bytes=pool.bytes,
                scratch_bytes=claim.scratch_bytes,
                budget_bytes=budget_bytes,
                linger_s=spec.linger_s,
            ),
            on_reply=reply,
            on_lost=on_done,
            timeout_ms=self._state.config.broker.load_timeout_ms,
        )

    def unload(
        self,
        device: Device,
        key: AgentKey,
        model: str,
        kv_type: KVType,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """Tell the worker to forget an agent that the ledger has released already. ``on_done``
        is called when it has, or when there is no worker (any more) to ask."""
        done = on_done or (lambda: None)
        self._state.admission_due.add(device.id)
        if device.link is None:
            done()
            return
        pool = device.ledger.pool(model, kv_type)
        budget_bytes = device.link.budget_bytes = device.ledger.budget_bytes

        def reply(message: ReplyMessage, raw: list[bytes]) -> bool:
            if isinstance(message, Failed):
                self._state.log(
                    "error", "unload_failed", agent=str(key), reason=message.error.reason
                )
            done()
            return True

        self._commander.send(
            device,
            lambda epoch, op: Unload(
                broker_epoch=epoch,
                op=op,
                agent=key,
                shape=None if pool is None else pool.shape,
                pool_bytes=0 if pool is None else pool.bytes,
                budget_bytes=budget_bytes,
            ),
            on_reply=reply,
            on_lost=lambda error: done(),
            timeout_ms=self._state.config.broker.load_timeout_ms,
        )
