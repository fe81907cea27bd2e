"""The device memory of one owner under a tag of its own: a model's weights, a pool's buffers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from vram_conductor.worker.vmm.library import Vmm

_NOTHING = nullcontext()


class Tagged:
    """Memory that can sleep, or that cannot, where there is no ``vmm``.

    Attributes:
        sleepable: something was allocated in :meth:`region`, in memory that can sleep.
        asleep: it sleeps.
        backup_bytes: pinned host memory that its backup takes.
    """

    def __init__(self, vmm: Vmm | None) -> None:
        self._vmm = vmm
        self._tag = vmm.new_tag() if vmm is not None else 0
        self.sleepable = self.asleep = False
        self.backup_bytes = 0

    @contextmanager
    def region(self) -> Generator[None]:
        """What the calling thread allocates on the device inside is this owner's."""
        if self._vmm is None:
            yield
            return
        with self._vmm.region(self._tag):
            yield
        self.sleepable = self._vmm.stat(self._tag).allocations > 0

    def growing(self) -> AbstractContextManager[None]:
        """The same for what is replaced by something larger, or comes late, which is seldom."""
        if self._vmm is None or not self.sleepable:
            return _NOTHING
        return self._vmm.region(self._tag)

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Copies of the calling thread wait for the device once, at the end, where they can; see
        :meth:`Vmm.gathered`. Raises Internal ``driver_error``."""
        if self._vmm is None:
            yield
            return
        with self._vmm.gathered():
            yield

    def back_up(self) -> None:
        """Copy the contents to pinned host memory, once. Raises Internal ``backup_failed``."""
        vmm = self._need()
        vmm.back_up(self._tag)
        self.backup_bytes = vmm.stat(self._tag).backup_bytes

    def drop_backup(self) -> None:
        """Give the pinned memory back. Raises Internal ``backup_failed``. Idempotent."""
        if self.backup_bytes:
            vmm = self._need()
            vmm.drop_backup(self._tag)
            self.backup_bytes = vmm.stat(self._tag).backup_bytes

    def sleep(self, *, keep: bool) -> None:
        """Give the memory back; ``keep``: the backup has the contents, otherwise it is all zero
        after the wake. Raises Internal ``sleep_failed``."""
        vmm = self._need()
        vmm.sleep(self._tag, keep)
        self.asleep = True

    def wake(self) -> None:
        """Take the memory again. Raises ``wake_failed``: it sleeps on."""
        vmm = self._need()
        vmm.wake(self._tag)
        self.asleep = False

    def _need(self) -> Vmm:
        assert self._vmm is not None, "this memory cannot sleep"
        return self._vmm
