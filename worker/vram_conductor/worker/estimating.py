"""The estimator thread: answers ESTIMATE while the engine thread streams.

Stage 0 needs no library: a file that alone is larger than the device is refused by its size.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from vram_conductor.protocol.commands import Estimate, Estimated, Failed
from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.protocol.split_files import part_paths
from vram_conductor.worker.arena_format import parked_bytes
from vram_conductor.worker.digest import Digester
from vram_conductor.worker.engine import Estimator
from vram_conductor.worker.outbox import Sent, info_of
from vram_conductor.worker.resolver import Resolver

log = logging.getLogger(__name__)


def check_file_size(path: Path, cap_bytes: int | None) -> None:
    """Stage 0, over all files of the model.

    Raises:
        OutOfRange: ``file_exceeds_cap``.
    """
    file_bytes = sum(part.stat().st_size for part in part_paths(path))
    if cap_bytes is not None and file_bytes > cap_bytes:
        raise OutOfRange(
            "file_exceeds_cap",
            f"{path.name} has {file_bytes} bytes, the device may hold {cap_bytes} in all: it never "
            "fits; choose a smaller model or quantisation",
            file_bytes=file_bytes,
            cap_bytes=cap_bytes,
        )


class Estimating:
    """Owns the estimator thread.

    Args:
        send: takes the replies; thread-safe.
    """

    def __init__(
        self,
        estimator: Estimator,
        resolver: Resolver,
        digester: Digester,
        worker_epoch: int,
        send: Callable[[Sent], None],
    ) -> None:
        self._estimator = estimator
        self._resolver = resolver
        self._digester = digester
        self._worker_epoch = worker_epoch
        self._send = send
        self._queue: queue.SimpleQueue[Estimate | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="estimator", daemon=True)
        self._thread.start()

    def submit(self, command: Estimate) -> None:
        """Answer ``command`` soon. Any thread."""
        self._queue.put(command)

    def close(self) -> None:
        """Answer nothing more; an estimate that is under way is not waited for."""
        self._queue.put(None)

    def _loop(self) -> None:
        while (command := self._queue.get()) is not None:
            self._send((self.answer(command), []))

    def answer(self, command: Estimate) -> Estimated | Failed:
        """The reply to ``command``; every failure is a typed one."""
        try:
            return self._estimate(command)
        except Exception as error:
            info = info_of(error)
            if info.reason == "internal_error":
                log.exception("an estimate of %s failed", command.model)
            return Failed(
                broker_epoch=command.broker_epoch,
                op=command.op,
                worker_epoch=self._worker_epoch,
                error=info,
            )

    def _estimate(self, command: Estimate) -> Estimated:
        begin_ns = time.monotonic_ns()
        path = self._resolver.resolve(command.model, bare_path=command.bare_path)
        check_file_size(path, command.cap_bytes)
        result = self._estimator.estimate(
            str(path), command.model, command.shape, command.n_ctx, command.fit_bytes
        )
        known = result.info.digest or self._digester.known(path)
        return Estimated(
            broker_epoch=command.broker_epoch,
            op=command.op,
            worker_epoch=self._worker_epoch,
            model=msgspec.structs.replace(result.info, digest=known),
            shape=result.shape,
            weights_bytes=result.weights_bytes,
            pool_bytes=result.pool_bytes,
            kv_bytes=result.kv_bytes,
            compute_bytes=result.compute_bytes,
            recurrent_bytes=result.recurrent_bytes,
            state_bytes=parked_bytes(result.state_bytes),
            fit_cells=result.fit_cells,
            scratch_bytes=result.scratch_bytes,
            cached=result.cached,
            ms=round((time.monotonic_ns() - begin_ns) / 1e6, 3),
        )
