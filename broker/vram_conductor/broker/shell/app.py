"""Puts the broker together, runs it, takes it apart again.

Order of start: lock the state folder, open the journal, write the new epoch into it, bind, say
where. Order of end: the loop has drained; close the sockets, force the journal to the disk,
release the lock.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import zmq

from vram_conductor.broker.core import Core
from vram_conductor.broker.journal.journal import Journal
from vram_conductor.broker.journal.opening import Opened, open_journal
from vram_conductor.broker.journal.records import BrokerEpoch
from vram_conductor.broker.journal.state_lock import StateLock
from vram_conductor.broker.shell import auth, metrics, peer_watch
from vram_conductor.broker.shell.access import Access, open_access
from vram_conductor.broker.shell.logs import Logger
from vram_conductor.broker.shell.loop import Loop, Observer
from vram_conductor.broker.shell.options import (
    EXIT_DATA,
    EXIT_INTERNAL,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    Options,
    parse,
)
from vram_conductor.broker.shell.port import Port
from vram_conductor.broker.shell.stop import Stop
from vram_conductor.protocol import codec
from vram_conductor.protocol.commands import FromWorker
from vram_conductor.protocol.config import (
    client_endpoint,
    keys_dir,
    state_dir,
    worker_endpoint,
)
from vram_conductor.protocol.endpoints import Tcp, parse_endpoint
from vram_conductor.protocol.errors import ConductorError, DataLoss, InvalidArgument
from vram_conductor.protocol.ids import next_epoch
from vram_conductor.protocol.messages import ClientMessage, Error
from vram_conductor.protocol.sockets import listen
from vram_conductor.protocol.version import VERSION

CLIENT_HWM = 1_000
"""Messages that libzmq queues per client: small ones. Large ones are counted by bytes."""

_SETTINGS = {"auth_required", "unsafe_key_file", "no_key_file", "no_curve"}
"""Reasons, beside INVALID_ARGUMENT, for which another configuration is what helps."""

OPEN_FILES = 65_536
"""One descriptor per connection; the usual soft limit of 1024 is fewer than SESSIONS_MAX."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m vram_conductor.broker``; returns the exit code."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except InvalidArgument as error:
        Logger()("error", "broker.refused", reason=error.reason, why=error.info.message)
        return EXIT_USAGE
    log = Logger(options.log_format, options.log_level)
    try:
        return run(options, log)
    except ConductorError as error:
        log("error", "broker.refused", reason=error.reason, why=error.info.message)
        return exit_code(error)
    except Exception:
        # Crash rather than go on with a state that nobody understands: the journal has it all.
        log("error", "broker.crashed", trace=traceback.format_exc()[-900:])
        return EXIT_INTERNAL


def exit_code(error: ConductorError) -> int:
    """Exit code for an error that keeps the broker from starting."""
    if isinstance(error, InvalidArgument) or error.reason in _SETTINGS:
        return EXIT_USAGE
    if isinstance(error, DataLoss) or error.reason == "journal_newer":
        return EXIT_DATA
    return EXIT_UNAVAILABLE


def run(options: Options, log: Logger) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        ConductorError: it cannot start; nothing stays locked or bound.
    """
    config = options.config
    _check_supervised_fd(options.supervised_fd)
    _allow_many_connections()
    with ExitStack() as stack:
        # First in, last out: no signal cuts the end short.
        stop = stack.enter_context(Stop(options.supervised_fd))
        lock = StateLock(state_dir(config.broker))
        stack.callback(lock.release)
        opened = open_journal(state_dir(config.broker), log, skip_corrupt=options.skip_corrupt)
        journal = Journal(opened, log)
        stack.callback(journal.close)
        epoch = _new_epoch(opened, journal)
        context = zmq.Context()
        stack.callback(context.term)
        endpoints = client_endpoint(config.broker), worker_endpoint(config.broker)
        access = open_access(context, keys_dir(config.broker), endpoints, log)
        if access is not None:
            stack.callback(access.close)
        clients, workers = _bind(options, context, access, log, stack)
        core = Core(
            config, epoch, opened.restored, time.monotonic_ns(), VERSION, unix_ns=time.time_ns()
        )
        observe = _metrics(options, core, journal, (clients, workers), stack)
        loop = Loop(
            core,
            clients,
            workers,
            None if _locks(access, endpoints[0]) else auth.identify(clients.endpoint),
            journal,
            stop,
            log,
            drain_ms=config.broker.drain_ms,
            observe=observe,
            access=access,
            workers_locked=_locks(access, endpoints[1]),
        )
        _announce(options, clients.endpoint, workers.endpoint, epoch, log)
        # What exists now stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        code = loop.run()
        log("info", "broker.stopped", code=code)
        return code


def _locks(access: Access | None, endpoint: str) -> bool:
    """Whether peers of this endpoint need a key."""
    return access is not None and isinstance(parse_endpoint(endpoint), Tcp)


def _bind(
    options: Options,
    context: zmq.Context[zmq.Socket[bytes]],
    access: Access | None,
    log: Logger,
    stack: ExitStack,
) -> tuple[Port[ClientMessage], Port[FromWorker]]:
    broker = options.config.broker
    clients: Port[ClientMessage] = Port(
        listen(
            context,
            client_endpoint(broker),
            hwm=CLIENT_HWM,
            locked=None if access is None else access.locked(auth.CLIENTS),
            events=peer_watch.EVENTS,
        ),
        codec.CLIENT_TO_BROKER,
        codec.BROKER_TO_CLIENT,
        lambda message, error: _to_client_instead(message, error, log),
    )
    stack.callback(clients.close)
    workers: Port[FromWorker] = Port(
        listen(
            context,
            worker_endpoint(broker),
            locked=None if access is None else access.locked(auth.WORKERS),
            events=peer_watch.EVENTS,
        ),
        codec.WORKER_TO_BROKER,
        codec.BROKER_TO_WORKER,
        lambda message, error: _to_worker_instead(message, error, log),
    )
    stack.callback(workers.close)
    return clients, workers


def _to_client_instead(
    message: msgspec.Struct, error: ConductorError, log: Logger
) -> msgspec.Struct | None:
    """An answer that no frame can hold becomes the error that says so."""
    log("warning", "broker.unsendable", type=type(message).__name__, reason=error.reason)
    return Error(rid=getattr(message, "rid", b""), error=error.info)


def _to_worker_instead(message: msgspec.Struct, error: ConductorError, log: Logger) -> None:
    """The limits of requests leave room for what a command adds: this would be our bug."""
    log("error", "broker.unsendable", type=type(message).__name__, reason=error.reason)


def _new_epoch(opened: Opened, journal: Journal) -> int:
    """Larger than every earlier one, whatever the clock says, and in the journal."""
    epoch = next_epoch(time.time_ns(), opened.restored.broker_epoch)
    journal.append(BrokerEpoch(broker_epoch=epoch))
    return epoch


def _metrics(
    options: Options,
    core: Core,
    journal: Journal,
    ports: tuple[Port[ClientMessage], Port[FromWorker]],
    stack: ExitStack,
) -> Observer | None:
    port = options.config.broker.metrics_port
    if not port:
        return None

    def shell() -> metrics.Shell:
        return metrics.Shell(
            journal_waiting=journal.waiting,
            journal_bytes=journal.size_bytes,
            waiting_bytes=sum(port.outbox.bytes for port in ports),
            dropped_peers=sum(port.dropped_peers for port in ports),
        )

    tally = metrics.Tally(lambda: core.report(time.monotonic_ns()), shell, time.monotonic_ns)
    stack.callback(metrics.serve(port, tally.samples))
    return tally.observe


def _announce(options: Options, clients: str, workers: str, epoch: int, log: Logger) -> None:
    log("info", "broker.ready", clients=clients, workers=workers, epoch=epoch, pid=os.getpid())
    if options.print_endpoints:
        # The reader may have gone; that is the supervisor pipe's news, not this one's.
        with contextlib.suppress(OSError):
            sys.stdout.write(json.dumps({"clients": clients, "workers": workers}) + "\n")
            sys.stdout.flush()


def _check_supervised_fd(fd: int | None) -> None:
    if fd is None:
        return
    try:
        os.fstat(fd)
    except OSError:
        raise InvalidArgument(
            "bad_config", f"--supervised-fd {fd} is not open; pass the read end of a pipe", fd=fd
        ) from None


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
