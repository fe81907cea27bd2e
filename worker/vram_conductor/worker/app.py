"""Puts the worker together, runs it, takes it apart again.

Threads: this one is the engine thread and makes all decisions; beside it run the lanes that carry
them out (on cuda), the IO thread (``link``), two preparers of prompts, the estimator, the sealer
and the digester. They talk through queues only. Processes are started by exec, never forked.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.protocol.catalogue_files import CatalogueFiles
from vram_conductor.protocol.commands import Estimate
from vram_conductor.protocol.config import (
    WorkerConfig,
    arena_dir,
    models_dir,
    parse_bytes,
    worker_endpoint,
)
from vram_conductor.protocol.errors import ConductorError, InvalidArgument
from vram_conductor.protocol.key_files import load_key
from vram_conductor.protocol.version import VERSION
from vram_conductor.worker import logs
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.capacity import CapacitySampler, open_gpu
from vram_conductor.worker.core import Core
from vram_conductor.worker.digest import Digester
from vram_conductor.worker.engine import Estimator
from vram_conductor.worker.estimating import Estimating
from vram_conductor.worker.exits import EXIT_INTERNAL, EXIT_USAGE, exit_code
from vram_conductor.worker.gauge import watch
from vram_conductor.worker.identity import Identity
from vram_conductor.worker.inbound import Arrived, Inbound
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.lane import InlineLanes, Lanes, ThreadLanes
from vram_conductor.worker.link import Link
from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.loop import EngineLoop, Inbox, Wake
from vram_conductor.worker.memory import CpuSampler
from vram_conductor.worker.options import Options, parse
from vram_conductor.worker.pin_cuda import CudaPinner
from vram_conductor.worker.pinning import Pinning
from vram_conductor.worker.preparer import ThreadPreparer
from vram_conductor.worker.resolver import Resolver
from vram_conductor.worker.stops import stop_signals, watch_supervisor
from vram_conductor.worker.streams import JOIN_TOKENS, Joining
from vram_conductor.worker.vram import NvmlSampler
from vram_conductor.worker.watchdog import tell_crashes

log = logging.getLogger(__name__)

DeviceSampler = CpuSampler | NvmlSampler | CapacitySampler

SWITCH_S = 0.0005
"""How long a thread that computes in Python may keep others waiting: the engine thread asks for
the interpreter several times per token."""

LOCK_PATIENCE_S = 10.0
"""A worker that was killed keeps its lock until its memory is gone; one whose supervisor was
killed, until everything is parked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m vram_conductor.worker``; returns the exit code."""
    logs.set_up()
    tell_crashes()
    try:
        options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except InvalidArgument as error:
        log.error("refused: %s: %s", error.reason, error.info.message)
        return EXIT_USAGE
    logs.set_up(options.log_format, options.log_level, options.device.id)
    try:
        return run(options)
    except ConductorError as error:
        log.error("refused: %s: %s", error.reason, error.info.message)
        return exit_code(error, supervised=options.supervised_fd is not None)
    except Exception:
        # Crash rather than go on with a state that nobody understands: parked states survive.
        log.exception("crashed")
        return EXIT_INTERNAL


def run(options: Options) -> int:
    """Serve until told to leave; returns the exit code.

    Raises:
        ConductorError: it cannot start; nothing stays locked.
    """
    sys.setswitchinterval(SWITCH_S)
    inbox: Inbox = queue.SimpleQueue()
    watch_supervisor(options.supervised_fd, inbox)
    with ExitStack() as stack:
        stack.enter_context(stop_signals(inbox))
        return build(options, inbox, stack).run()


def build(options: Options, inbox: Inbox, stack: ExitStack) -> EngineLoop:
    """Everything, in order; ``stack`` takes it apart in reverse."""
    device = options.device
    store = open_store(options, stack)
    sampler = open_sampler(options, store)
    stack.callback(sampler.close)
    engine_options = engine_options_for(options, sampler)
    engine = open_engine(engine_options)
    stack.callback(engine.close)
    if isinstance(sampler, CapacitySampler):
        sampler.use(engine.used_bytes, engine.total_bytes)
    start_pinning(options, store.pinning)
    identity = Identity(
        worker_epoch=time.time_ns(),
        version=VERSION,
        build=engine.build,
        base_bytes=sampler.measure_base(),
        host_total_bytes=store.capacity_bytes,
        mechanism=engine.mechanism,
        mechanism_note="; ".join(filter(None, (engine.mechanism_note, store.pinning.note()))),
    )
    wake = Wake()
    preparer = ThreadPreparer(lambda: inbox.put(wake))
    stack.callback(preparer.close)
    lanes = lanes_for(options, lambda: inbox.put(wake))
    stack.callback(lanes.close)
    core = Core(
        engine,
        store,
        worker_epoch=identity.worker_epoch,
        clock=time.monotonic_ns,
        draw_seed=lambda: random.SystemRandom().getrandbits(32),
        base_bytes=identity.base_bytes,
        batch_tokens=engine_options.batch_tokens,
        preparer=preparer,
        lanes=lanes,
        joining=Joining(JOIN_TOKENS) if lanes.parallel else None,
        prefetch=lanes.parallel,
    )
    parts = Parts(core, store, engine.estimator, sampler, identity)
    loop = connect(options, parts, inbox, stack)
    log.info("serving %s, build %s", device.id, engine.build)
    return loop


def lanes_for(options: Options, wake: Callable[[], None]) -> Lanes:
    """Threads or not, as the configuration says, else as the device is."""
    mode = options.config.worker.lanes
    if mode == "threads" or (mode == "auto" and options.device.kind == "cuda"):
        return ThreadLanes(wake)
    return InlineLanes()


@dataclass(frozen=True)
class Parts:
    """What belongs to the engine thread."""

    core: Core
    store: KVStore
    estimator: Estimator
    sampler: DeviceSampler
    identity: Identity


def connect(options: Options, parts: Parts, inbox: Inbox, stack: ExitStack) -> EngineLoop:
    """Start the threads that talk to the broker, and make the loop for this one."""
    worker = options.config.worker
    digester = Digester(enabled=worker.verify_digest)
    stack.callback(digester.close)
    resolver = open_resolver(worker)
    key = load_key(Path(worker.key).expanduser()) if worker.key else None
    link = Link(
        worker_endpoint(options.config.broker),
        lambda item: route(item),
        lambda: loop.progress(),
        worker.hang_ms,
        key,
    )
    stack.callback(link.close)
    worker_epoch = parts.identity.worker_epoch
    estimating = Estimating(parts.estimator, resolver, digester, worker_epoch, link.send)
    stack.callback(estimating.close)
    route: Callable[[Inbound], None] = router(inbox, estimating)
    core, pinning = parts.core, parts.store.pinning
    gauge = watch(parts.sampler, core.residency, core.jobs, lambda: pinning.figures().pinned_bytes)
    loop = EngineLoop(
        parts.core,
        parts.store,
        link,
        inbox,
        gauge,
        resolver,
        digester,
        parts.identity,
        worker.sample_ms,
        worker.drain_ms,
        lambda: gauge.worn,
    )
    link.start()
    return loop


def open_sampler(options: Options, store: KVStore) -> DeviceSampler:
    """What measures the device."""
    device = options.device
    capacity_bytes = parse_bytes(device.capacity)
    if device.kind == "cuda":
        return open_gpu(device.id, capacity_bytes)
    return CpuSampler(device.id, capacity_bytes, store.capacity_bytes, lambda: store.used_bytes)


def router(inbox: Inbox, estimating: Estimating) -> Callable[[Inbound], None]:
    """Where what the broker sends goes: to the engine; estimates to their own thread, too."""

    def route(item: Inbound) -> None:
        if isinstance(item, Arrived) and isinstance(item.message, Estimate):
            estimating.submit(item.message)
        inbox.put(item)  # of an estimate only that it came: it wants a fresh sample beside it

    return route


def open_store(options: Options, stack: ExitStack) -> KVStore:
    """The parked states of this device; never promises more than the file system has. What was
    given beyond that is for backups of weights, which lie in no file."""
    config, device = options.config, options.device
    folder = ArenaDir(arena_dir(config), device.id, LOCK_PATIENCE_S)
    stack.callback(folder.close)
    wanted = parse_bytes(device.host_cap)
    info = os.fstatvfs(folder.fd)
    total = info.f_blocks * info.f_frsize
    if wanted > total:
        log.warning(
            "host_cap is %d bytes, %s has %d: enlarge it (a container's /dev/shm: --shm-size)",
            wanted,
            folder.path,
            total,
        )
    pinned_cap = device.pinned_cap if device.kind == "cuda" else 0
    pinning = Pinning(total if pinned_cap is None else parse_bytes(pinned_cap))
    stack.callback(pinning.close)
    store = KVStore(folder, min(wanted, total), pinning=pinning)
    store.beside_bytes = max(0, wanted - total)
    stack.callback(store.close)
    return store


def start_pinning(options: Options, pinning: Pinning) -> None:
    """Pin parked states, now that the device is in use; without it, copies are slower."""
    if options.device.kind != "cuda" or not pinning.figures().cap_bytes:
        return
    try:
        pinning.use(CudaPinner())
    except ConductorError as error:
        pinning.give_up(error.info.message)


def engine_options_for(options: Options, sampler: DeviceSampler) -> EngineOptions:
    """The engine's settings; on cuda the process is narrowed to its one GPU first."""
    device = options.device
    uuid = ""
    if isinstance(sampler, NvmlSampler):
        # CUDA and NVML number GPUs differently; the UUID means the same to both. Set before the
        # library is loaded.
        uuid = sampler.uuid
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    elif isinstance(sampler, CapacitySampler):
        os.environ["CUDA_VISIBLE_DEVICES"] = sampler.target
    return EngineOptions(
        device_kind=device.kind,
        device_index=0,
        device_uuid=uuid,
        threads=device.threads,
        n_ubatch=device.n_ubatch,
    )


def open_resolver(config: WorkerConfig) -> Resolver:
    """Raises InvalidArgument ``bad_catalogue``."""
    catalogue = CatalogueFiles(config)
    catalogue.load()
    return Resolver(
        catalogue,
        catalogue.own.parent,
        models_dir(config),
        [Path(folder) for folder in config.model_dirs],
        socket.gethostname(),
    )
