"""Valid messages between broker and worker, in both directions. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from vram_conductor.protocol import commands
from vram_conductor.protocol.codec import BROKER_TO_WORKER
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.tokens import pack_tokens
from vram_conductor.protocol.values import (
    AgentKey,
    ConversationKey,
    DeviceInfo,
    Line,
    Memory,
    ModelInfo,
    MoveRate,
    PoolShape,
)
from vram_conductor.protocol.vectors import conversation_cases, run_cases
from vram_conductor.protocol.vectors.client_cases import USAGE, VERSION
from vram_conductor.protocol.vectors.vector import Vector

EPOCH = 1_700_000_000_123_456_789
WORKER_EPOCH = 1_700_000_001_000_000_000
AGENT = AgentKey("local", "coder")
CONVERSATION = ConversationKey("local", "coder", "main")
SHAPE = PoolShape(4096, 2, "q8_0")
RAW = pack_tokens([1, 2, 65_536, 2**31 - 1])
MEMORY = Memory(used_bytes=3 * 10**9, own_bytes=2 * 10**9, foreign_bytes=10**9, age_ms=15)
CPU = DeviceInfo(device="cpu", kind="cpu", name="processor", total_bytes=2**33)
GPU = DeviceInfo(
    device="cuda:0",
    kind="cuda",
    name="accelerator",
    total_bytes=2**33,
    reserved_bytes=2**28,
    uuid="GPU-00000000-0000-0000-0000-000000000000",
)
ERROR = ErrorInfo(Code.INTERNAL, "decode_failed", "llama_decode returned -3", details={"rc": -3})
MODEL = ModelInfo(
    model="ab12cd34",
    name="smollm2-135m",
    path="/models/smollm2.gguf",
    file_bytes=98_000_000,
    arch="llama",
    n_ctx_train=8192,
    n_vocab=49_152,
    chat_template=True,
    rollback="window",
    digest="00" * 32,
)

Cases = dict[str, tuple[msgspec.Struct, list[bytes]]]


def broker_commands() -> Cases:
    """Every message of the broker to a worker."""
    runs = run_cases.runs(EPOCH, CONVERSATION, RAW)
    return _links() | _agents() | runs | conversation_cases.commands(EPOCH)


def _links() -> Cases:
    c = commands
    return {
        "w_welcome": (c.WorkerWelcome(v=VERSION, broker_epoch=EPOCH, heartbeat_ms=2000), []),
        "w_welcome_full": (
            c.WorkerWelcome(
                v=VERSION,
                broker_epoch=EPOCH,
                heartbeat_ms=2000,
                conversations=[CONVERSATION],
                resume_ms=10_000,
            ),
            [],
        ),
        "w_no_session": (c.NoSession(), []),
        "w_refused": (c.WorkerRefused(error=ERROR), []),
        "w_pong": (c.WorkerPong(n=5), []),
        "w_pong_order": (c.WorkerPong(order=256), []),
        "w_resumed": (c.Resumed(order=300), []),
        "drain": (c.Drain(broker_epoch=EPOCH, op=10, drain_ms=10_000), []),
    }


def _agents() -> Cases:
    c = commands
    return {
        "estimate": (
            c.Estimate(broker_epoch=EPOCH, op=1, model="smollm2-135m", shape=SHAPE, n_ctx=2048),
            [],
        ),
        "estimate_full": (
            c.Estimate(
                broker_epoch=EPOCH,
                op=2,
                model="/m.gguf",
                shape=SHAPE,
                n_ctx=2048,
                fit_bytes=500_000_000,
                cap_bytes=8_000_000_000,
                bare_path=True,
            ),
            [],
        ),
        "load": (
            c.Load(
                broker_epoch=EPOCH,
                op=3,
                agent=AGENT,
                model=MODEL.model,
                path=MODEL.path,
                shape=SHAPE,
                n_ctx=2048,
                state_bytes=23_000_000,
                weights_bytes=91_000_000,
                pool_bytes=120_000_000,
                budget_bytes=2**40,
                scratch_bytes=12_582_912,
                linger_s=30,
            ),
            [],
        ),
        "unload": (c.Unload(broker_epoch=EPOCH, op=4, agent=AGENT), []),
        "unload_full": (
            c.Unload(
                broker_epoch=EPOCH, op=5, agent=AGENT, shape=SHAPE, pool_bytes=7, budget_bytes=8
            ),
            [],
        ),
        "forget": (c.Forget(broker_epoch=EPOCH, op=6, conversation=CONVERSATION), []),
        "budget": (c.Budget(broker_epoch=EPOCH, op=7, budget_bytes=0), []),
        "cancel_run": (c.CancelRun(broker_epoch=EPOCH, op=8, run_op=9), []),
    }


def _estimated(echo: dict[str, Any]) -> commands.Estimated:
    return commands.Estimated(
        **echo,
        model=MODEL,
        shape=SHAPE,
        weights_bytes=91_000_000,
        pool_bytes=120_000_000,
        kv_bytes=100_000_000,
        compute_bytes=20_000_000,
        recurrent_bytes=1_000_000,
        state_bytes=23_000_000,
        fit_cells=8192,
        cached=True,
        ms=0.25,
        scratch_bytes=12_582_912,
    )


def worker_replies() -> Cases:
    """Every message of a worker to the broker."""
    c = commands
    echo: dict[str, Any] = {"broker_epoch": EPOCH, "op": 12, "worker_epoch": WORKER_EPOCH}
    found: Cases = {
        "estimated": (_estimated(echo), []),
        "loaded_unmeasured": (c.Loaded(**echo), []),
        "loaded_full": (
            c.Loaded(
                **echo,
                weights_bytes=91_000_000,
                pool_bytes=120_000_000,
                scratch_bytes=8_000_000,
                digest="00" * 32,
                ms=350.5,
            ),
            [],
        ),
        "w_ok": (c.WorkerOk(**echo), []),
        "started": (c.Started(**echo, job=2, keep=4, prompt_tokens=8), [RAW]),
        "started_no_new_ids": (c.Started(**echo, job=2, keep=4, n_raw=0), []),
        "run_tokens": (c.RunTokens(**echo, job=2, text="Hi", ids=[9906]), []),
        "run_tokens_half_character": (c.RunTokens(**echo, job=2, text="", ids=[240]), []),
        "run_done": (c.RunDone(**echo, job=2, usage=USAGE), []),
        "run_done_parked": (
            c.RunDone(**echo, job=2, usage=USAGE, where="parked", parked_bytes=1_000_000),
            [],
        ),
        "failed": (c.Failed(**echo, error=ERROR), []),
        "failed_run": (c.Failed(**echo, error=ERROR, job=2, usage=USAGE), []),
        "w_ping": (c.WorkerPing(n=5, steps=1000), []),
        "w_ping_busy": (c.WorkerPing(n=6, steps=1001, busy=True, op=12), []),
        "w_resume": (
            c.Resume(device="cuda:0", broker_epoch=EPOCH, worker_epoch=WORKER_EPOCH, op=12),
            [],
        ),
        "w_bye": (c.WorkerBye(worker_epoch=WORKER_EPOCH), []),
        **conversation_cases.replies(echo),
    }
    return found | _reports()


def numbered() -> Cases:
    """One reply of every type, as it leaves in a session that can be resumed."""
    found: Cases = {}
    for name, (message, raw) in worker_replies().items():
        kind = type(message)
        if isinstance(message, commands.Reply) and not any(
            isinstance(seen, kind) for seen, _ in found.values()
        ):
            found[f"{name}_order"] = (msgspec.structs.replace(message, order=len(found) + 1), raw)
    return found


def _ready() -> commands.Ready:
    return commands.Ready(
        v=VERSION,
        worker="cpu@host",
        worker_epoch=WORKER_EPOCH,
        pid=4711,
        host="host",
        version="0.1.0",
        build="b7000",
        device=CPU,
        memory=MEMORY,
    )


def _reports() -> Cases:
    ready = _ready()
    parked = commands.Parked(
        conversation=CONVERSATION, model=MODEL.model, n_tokens=700, bytes=16_000_000
    )
    found: Cases = {
        "ready": (ready, []),
        "ready_full": (
            msgspec.structs.replace(
                ready,
                device=GPU,
                base_bytes=400_000_000,
                mechanism="vmm-sleep",
                mechanism_note="libcuda 13",
                parked=[parked],
                host_total_bytes=2**32,
                features=["structured_output"],
            ),
            [],
        ),
    }
    return found | _residencies()


def _residencies() -> Cases:
    place = commands.Place(
        conversation=CONVERSATION, where="parked", n_tokens=700, parked_bytes=16_000_000
    )
    residency = commands.Residency(
        broker_epoch=EPOCH, worker_epoch=WORKER_EPOCH, seq=1, memory=MEMORY
    )
    full = msgspec.structs.replace(
        residency,
        seq=2,
        lines=[Line("base", 1), Line("pool:ab12@q8_0", 2, True, "4096 cells × 2", SHAPE)],
        host_lines=[Line("parked:local/coder/main", 16_000_000)],
        places=[place],
        swaps=12,
        rates={"state_in": MoveRate(count=2, bytes=64, ms=1.5, last_bytes=32, last_ms=0.5)},
        base_bytes=17,
        lingered=3,
        order=8,
    )
    return {"residency": (residency, []), "residency_full": (full, [])}


def worker_vectors() -> Iterator[Vector]:
    """All of worker.json."""
    for name, (message, raw) in broker_commands().items():
        yield Vector(name, "broker_to_worker", BROKER_TO_WORKER.encode(message, raw))
    for name, (message, raw) in (worker_replies() | numbered()).items():
        yield Vector(name, "worker_to_broker", BROKER_TO_WORKER.encode(message, raw))
