"""What would fit, asked by the blocking and the asyncio client."""

from __future__ import annotations

from vram_conductor.client.answers import typed
from vram_conductor.client.calling import AsyncCalling, Calling
from vram_conductor.client.requests import checked, checked_timeout_ms
from vram_conductor.protocol.fitting import Fit, FitReport
from vram_conductor.protocol.ids import new_rid

FIT_TIMEOUT_S = 660.0
"""As long as estimates may take; a dead broker is noticed within seconds."""


class Surveying(Calling):
    """Part of ``Conductor``."""

    def fit(
        self,
        model: str,
        *,
        device: str | None = None,
        slots: int = 1,
        timeout_s: float = FIT_TIMEOUT_S,
    ) -> FitReport:
        """How large a context one more agent of a model could have now, beside all that is
        promised: on every device, and for KV caches of f16, q8_0 and q4_0. Promises nothing and
        loads nothing.

        Args:
            model, slots: as for :meth:`Conductor.register`.
            device: only this one.
            timeout_s: how long it may take without news, in seconds.

        Returns:
            One row per device and KV type: the largest ``n_ctx`` that ``register`` would take,
            what limits it, and the bytes that it is made of.

        Raises:
            NotFound: no such model or device; ``model_not_pulled``.
            Unavailable: ``no_worker``.
            ResourceExhausted: ``too_many_waiters``: one at a time.
        """
        message = checked(Fit(rid=new_rid(), model=model, device=device, slots=slots))
        return typed(self._call(message, checked_timeout_ms("timeout_s", timeout_s)), FitReport)


class AsyncSurveying(AsyncCalling):
    """Part of ``AsyncConductor``."""

    async def fit(
        self,
        model: str,
        *,
        device: str | None = None,
        slots: int = 1,
        timeout_s: float = FIT_TIMEOUT_S,
    ) -> FitReport:
        """How large a context would fit; see ``Conductor.fit``."""
        message = checked(Fit(rid=new_rid(), model=model, device=device, slots=slots))
        body = await self._call(message, checked_timeout_ms("timeout_s", timeout_s))
        return typed(body, FitReport)
