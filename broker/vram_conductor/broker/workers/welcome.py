"""The answer to READY (*pure*): whether a worker is acceptable, and W_WELCOME."""

from __future__ import annotations

from vram_conductor.broker.errors import given_up_error
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.residency import check_numbers
from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Ready, WorkerWelcome
from vram_conductor.protocol.config import Config
from vram_conductor.protocol.errors import Code, ErrorInfo

VERSION = (limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR)


def refusal(config: Config, device: Device | None, ready: Ready) -> ErrorInfo | None:
    """Why this worker can never serve, None if it can. ``device``: the one it names."""
    name = ready.device.device
    if ready.v[0] != limits.PROTOCOL_MAJOR:
        return ErrorInfo(
            Code.UNIMPLEMENTED,
            "unsupported_version",
            f"the worker speaks protocol {ready.v[0]}, the broker {limits.PROTOCOL_MAJOR}; "
            "upgrade the older one",
            details={"theirs": ready.v[0], "ours": limits.PROTOCOL_MAJOR},
        )
    if device is None:
        known = [item.id for item in config.device]
        return ErrorInfo(
            Code.NOT_FOUND,
            "no_such_device",
            f"device {name!r} is not in the broker's configuration ({', '.join(known) or 'none'}); "
            "add a [[device]] table for it",
            details={"device": name, "devices": known},
        )
    if device.config.kind != ready.device.kind:
        return ErrorInfo(
            Code.FAILED_PRECONDITION,
            "wrong_device_kind",
            f"device {name!r} is configured as {device.config.kind}, the worker found "
            f"{ready.device.kind}; correct the [[device]] table",
            details={"device": name},
        )
    if ready.worker_epoch == device.given_up:
        return given_up_error(name)
    return check_build(config.broker.builds, ready) or check_numbers(config, device, ready)


def check_build(builds: list[str], ready: Ready) -> ErrorInfo | None:
    """Why the worker's library build will not do; None if it will. ``builds``: as configured."""
    release = ready.build.partition("+")[0]
    if not builds or ready.build in builds or release in builds:
        return None
    return ErrorInfo(
        Code.FAILED_PRECONDITION,
        "unsupported_build",
        f"the worker {ready.worker} has the library build {ready.build}, this broker takes only "
        f"{', '.join(builds)} (broker.builds): install that for the worker, or add its build to "
        "the list",
        details={"theirs": ready.build, "ours": builds, "version": ready.version},
    )


def log_ready(state: State, device: Device, ready: Ready) -> None:
    """Say who serves the device from now on, and what is new about it."""
    state.log(
        "info",
        "worker_ready",
        device=device.id,
        worker=ready.worker,
        pid=ready.pid,
        version=ready.version,
        build=ready.build,
    )
    if state.version and ready.version != state.version:
        state.log(
            "warning",
            "worker_of_another_version",
            device=device.id,
            worker=ready.version,
            broker=state.version,
            what="they understand each other; upgrade the older one when you can",
        )
    if device.former_build:
        state.log(
            "warning",
            "worker_build_changed",
            device=device.id,
            was=device.former_build,
            now=ready.build,
            what="parked states of the former build are of no use; sizes are asked anew",
        )


def welcome_message(state: State, device: Device) -> WorkerWelcome:
    """W_WELCOME with every conversation of the device that has a record."""
    return WorkerWelcome(
        v=VERSION,
        broker_epoch=state.broker_epoch,
        heartbeat_ms=state.config.broker.heartbeat_ms,
        conversations=[
            conversation.key
            for agent in state.registry.on(device.id)
            for conversation in agent.conversations.values()
            if conversation.transcript
        ],
        resume_ms=0 if device.link is None else device.link.resume_ms,
    )
