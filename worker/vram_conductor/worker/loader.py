"""Weights between disk, device and pinned host memory: load, free, back up, sleep, wake."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from vram_conductor.protocol.errors import ConductorError, FailedPrecondition
from vram_conductor.worker.backup import Backups, BackupView, plan_backups, room_bytes
from vram_conductor.worker.engine import Engine
from vram_conductor.worker.hostroom import HostRoom
from vram_conductor.worker.residency import Residency, Weights
from vram_conductor.worker.store import Store
from vram_conductor.worker.waker import Wakers

log = logging.getLogger(__name__)


class Loader:
    """The only one that loads and frees weights, and books their bytes.

    Attributes:
        loading: weights are being loaded or backed up, which may take long and counts no steps.
        broken: weights that the device itself refused to wake; free them.
    """

    def __init__(
        self, engine: Engine, residency: Residency, store: Store, clock: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._residency = residency
        self._room = HostRoom(store)
        self._clock = clock
        self._wakers = Wakers()
        self._wakes: list[Weights] = []
        self._errors: list[Exception] = []
        self._took: list[tuple[int, float]] = []
        self._began_ns: int | None = None
        self.loading = False
        self.broken: list[Weights] = []

    # --- disk and device ----------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Load a model.

        Raises:
            ConductorError: ``load_failed``, ``model_changed`` …; nothing is loaded then.
        """
        begin = self._clock()
        self.loading = True
        try:
            handle = self._engine.load(weights.path, weights.path.rsplit("/", 1)[-1])
        finally:
            self.loading = False
        if handle.info.model != weights.model:
            handle.close()
            raise FailedPrecondition(
                "model_changed",
                f"{weights.path} is not the file that was admitted; register the agent again",
                path=weights.path,
                admitted=weights.model,
                found=handle.info.model,
            )
        weights.handle, weights.asleep, weights.unbackable = handle, False, False
        weights.load_ms = (self._clock() - begin) / 1e6
        weights.bytes, weights.measured = handle.measured_bytes, True
        weights.used_ns = self._clock()
        self._residency.rates.note("load", weights.bytes, weights.load_ms)
        self._residency.revision += 1

    def free(self, weights: Weights) -> None:
        """Free a model's weights, awake or asleep, and their backup. Its pools are closed, and
        nobody reads its vocabulary."""
        assert weights.readers == 0
        if weights.handle is None:
            return
        weights.handle.close()
        weights.handle, weights.asleep = None, False
        self._settle(weights)
        self._residency.revision += 1

    # --- pinned host memory -------------------------------------------------------------------

    def plan_backups(self) -> Backups:
        """Which backups should go or come, as things are."""
        residency = self._residency
        promised = [agent.state_bytes for agent in residency.agents.values()]
        return plan_backups(
            room_bytes(self._room.capacity_bytes, promised),
            [_backup_view(item) for item in residency.weights.values() if item.handle],
        )

    def reconsider(self) -> None:
        """What was refused before may be possible now."""
        for weights in self._residency.weights.values():
            weights.unbackable = False

    def back_up(self, weights: Weights) -> bool:
        """Copy the weights to pinned memory, if there is room for that."""
        handle = weights.handle
        assert handle is not None
        if handle.backup_bytes or weights.asleep or not handle.sleepable:
            return handle.backup_bytes > 0
        if not self._room.take(weights.bytes):
            # Parked states take more than was promised to them.
            weights.unbackable = True
            return False
        weights.lent_bytes = weights.bytes
        begin = self._clock()
        self.loading = True
        try:
            handle.back_up()
        except ConductorError as error:
            log.warning("%s is not backed up: %s", weights.path, error.info.message)
            weights.unbackable = True
        finally:
            self.loading = False
        if handle.backup_bytes:
            took_ms = (self._clock() - begin) / 1e6
            self._residency.rates.note("back_up", handle.backup_bytes, took_ms)
            if not self._room.take(max(0, handle.backup_bytes - weights.lent_bytes)):
                handle.drop_backup()
                weights.unbackable = True
            else:
                weights.lent_bytes = max(weights.lent_bytes, handle.backup_bytes)
        self._settle(weights)
        return handle.backup_bytes > 0

    def drop_backup(self, weights: Weights) -> None:
        """Give the pinned memory of weights that are awake back."""
        assert not weights.asleep
        if weights.handle is not None:
            weights.handle.drop_backup()
        self._settle(weights)

    def _settle(self, weights: Weights) -> None:
        """Give back the room that the backup does not take (any more)."""
        taken = weights.handle.backup_bytes if weights.handle else 0
        if weights.lent_bytes > taken:
            self._room.give_back(weights.lent_bytes - taken)
            weights.lent_bytes = taken
        self._residency.revision += 1

    # --- sleep --------------------------------------------------------------------------------

    def sleep(self, weights: Weights) -> None:
        """Give the device's memory back.

        Raises:
            ConductorError: ``sleep_failed``: they are in an unknown state, free them.
        """
        assert weights.handle is not None
        assert not weights.asleep
        begin = self._clock()
        weights.handle.sleep()
        weights.asleep = True
        took_ms = (self._clock() - begin) / 1e6
        self._residency.rates.note("sleep_weights", weights.bytes, took_ms)
        self._residency.revision += 1

    def restore(self, weights: Weights) -> None:
        """After a sleep that failed, which may have taken a part of their memory: have them wholly
        awake. Where that fails, too, they count as asleep, so that nobody computes with them."""
        assert weights.handle is not None
        try:
            weights.handle.wake()
        except ConductorError as error:
            log.error("%s has lost device memory: %s", weights.path, error.info.message)
            weights.asleep = True
        self._residency.revision += 1

    def start_wake(self, weights: Weights) -> None:
        """Wake weights; on a GPU beside what else the caller does until :meth:`join`. Their
        bytes count from now on."""
        assert weights.asleep
        weights.asleep = False
        self._residency.revision += 1
        if self._began_ns is None:
            self._began_ns = self._clock()
        if self._engine.device_kind != "cuda":
            self._wake(weights)
            self._note_wakes([weights])
            return
        self._wakes.append(weights)
        self._wakers.begin(partial(self._wake, weights))

    def join(self) -> None:
        """Wait for all wakes that were started.

        Raises:
            ConductorError: ``wake_failed``: the first that failed; they all sleep on.
        """
        self._wakers.join()
        wakes, self._wakes = self._wakes, []
        self._note_wakes(wakes)
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _note_wakes(self, woken: list[Weights]) -> None:
        """What was copied in, and all the time until it was there: pools wake beside it, and KV
        comes."""
        took, self._took = self._took, []
        for size_bytes, ms in took:
            self._residency.rates.note("wake_weights", size_bytes, ms)
        began_ns, self._began_ns = self._began_ns, None
        size_bytes = sum(weights.bytes for weights in woken if not weights.asleep)
        if began_ns is not None and size_bytes:
            self._residency.rates.note("wake", size_bytes, (self._clock() - began_ns) / 1e6)

    def _wake(self, weights: Weights) -> None:
        assert weights.handle is not None
        begin = self._clock()
        try:
            weights.handle.wake()
        except Exception as error:
            weights.asleep = True
            self._errors.append(error)
            if not waits(error):
                self.broken.append(weights)
            return
        # Noted by whoever joins: several may be done at once.
        self._took.append((weights.bytes, (self._clock() - begin) / 1e6))


def given_up(error: Exception) -> bool:
    """Whether the device itself has refused to wake or to put to sleep. What it was about has been
    unloaded or closed by then, if nobody reads it, and can be loaded or opened again."""
    reasons = ("wake_failed", "sleep_failed", "backup_gone")
    return isinstance(error, ConductorError) and error.reason in reasons and not error.retryable


def waits(error: Exception) -> bool:
    """Whether a job should go on waiting for room after ``error``: others have taken the memory
    that the ledger counts as free. It is to be measured again at once."""
    return isinstance(error, ConductorError) and error.reason == "wake_failed" and error.retryable


def _backup_view(weights: Weights) -> BackupView:
    handle = weights.handle
    assert handle is not None
    return BackupView(
        weights.model,
        handle.backup_bytes or weights.bytes,
        backed=handle.backup_bytes > 0,
        can=handle.sleepable and not weights.asleep and not weights.unbackable,
        stays=weights.asleep and weights.readers > 0,
        used_ns=weights.used_ns,
    )
