"""Valid messages between client and broker, in both directions. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vram_conductor.protocol import limits, messages
from vram_conductor.protocol.codec import CLIENT_TO_BROKER
from vram_conductor.protocol.errors import LEDGER_DENY, Code, ErrorInfo
from vram_conductor.protocol.values import Message, Sampling, Swap, Usage
from vram_conductor.protocol.vectors import (
    conversation_cases,
    drain_cases,
    fit_cases,
    structure_cases,
)
from vram_conductor.protocol.vectors.vector import Direction, Vector

RID = bytes.fromhex("017f22e279b07cc398c4dc0c0c07398f")
OTHER_RID = bytes(range(16))
VERSION = (limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR)

ALL_SAMPLING = Sampling(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.1,
    repeat_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    penalty_last_n=-1,
    seed=2**32 - 1,
)

USAGE = Usage(
    prompt_tokens=700,
    reused_tokens=650,
    reprefilled_tokens=3,
    reprefill_reason="window_gone",
    generated_tokens=42,
    stop_reason="stop",
    queue_ms=1.5,
    ttft_ms=20.25,
    elapsed_ms=900.0,
    prefill_ms=12.0,
    decode_ms=800.0,
    state_version=7,
    seed=1234,
    swap=Swap(evicted=["local/writer/main"], restored=True, bytes=12_345_678, ms=3.5),
)

DENY = ErrorInfo(
    code=Code.RESOURCE_EXHAUSTED,
    reason=LEDGER_DENY,
    message="not admitted: 3.2 GiB asked, 1.0 GiB left; n_ctx 8192 would fit",
    retryable=True,
    retry_after_ms=5000,
    details={
        "code": "CAP",
        "ledger_max_bytes": 8_589_934_592,
        "ledger_allocated_bytes": 7_516_192_768,
        "requested_bytes": 3_435_973_836,
        "foreign_bytes": 0,
        "lines": [{"key": "weights:ab12", "bytes": 91_000_000}],
        "largest_n_ctx_that_fits": 8192,
        "hint": "n_ctx=8192",
    },
)


def client_requests() -> dict[str, msgspec.Struct]:
    """Every message of a client, at its smallest and at its fullest."""
    m = messages
    return {
        "hello": m.Hello(v=VERSION),
        "hello_full": m.Hello(v=VERSION, client="minimal/1.0", features=["resume", "credit"]),
        "hello_newer_minor": m.Hello(v=(VERSION[0], VERSION[1] + 9)),
        "register": m.Register(rid=RID, agent="coder", model="smollm2-135m"),
        "register_full": m.Register(
            rid=RID,
            agent="coder-1.b:x@y_z",
            model="/models/with space/é.gguf",
            n_ctx=4096,
            kv_type="q8_0",
            device="cuda:0",
            slots=4,
            priority=-100,
            sampling=ALL_SAMPLING,
            ephemeral=True,
            ttl_s=3600,
            linger_s=30,
        ),
        "register_longest_name": m.Register(rid=RID, agent="a" * 64, model="m"),
        "unregister": m.Unregister(rid=RID, agent="coder"),
        "unregister_as_admin": m.Unregister(rid=RID, agent="coder", principal="alice"),
        "list": m.List(rid=RID),
        "status": m.Status(rid=RID),
        "credit": m.Credit(rid=RID, ack=10, upto=42),
        "credit_zero": m.Credit(rid=RID, ack=0, upto=0),
        "cancel": m.Cancel(rid=RID),
        "cancel_any_rid": m.Cancel(rid=OTHER_RID),
        "resume": m.Resume(rid=RID),
        "resume_full": m.Resume(rid=RID, from_seq=17, window=49),
        "reset": m.Reset(rid=RID, agent="coder"),
        "reset_full": m.Reset(rid=RID, agent="coder", conversation="side"),
        **lease_requests(),
        **fit_cases.requests(RID),
        **drain_cases.requests(RID),
        "ping": m.Ping(),
        "ping_full": m.Ping(n=2**63 - 1),
        "bye": m.Bye(),
    } | conversation_cases.requests(RID)


def lease_requests() -> dict[str, msgspec.Struct]:
    """A program outside asks for memory, and gives it back."""
    lease = messages.Lease
    return {
        "lease": lease(rid=RID, name="train", lease_bytes=3_000_000_000),
        "lease_full": lease(
            rid=RID,
            name="train-1.b:x@y_z",
            lease_bytes=limits.BYTES_MAX,
            ttl_s=limits.LEASE_TTL_S_MAX,
            device="cuda:0",
            park=False,
            ephemeral=True,
        ),
        "lease_release": lease(rid=RID, name="train", release=True),
        "lease_of_another": lease(rid=RID, name="train", principal="alice"),
    }


def decode_requests() -> dict[str, msgspec.Struct]:
    """DECODE has the most fields, so it has a list of its own."""
    decode = messages.Decode
    return {
        "decode_prompt": decode(rid=RID, agent="coder", prompt="Say hi"),
        "decode_tokens": decode(rid=RID, agent="coder", tokens=[0, 1, 127, 128, 65_536, 2**31 - 1]),
        "decode_messages": decode(
            rid=RID,
            agent="coder",
            messages=[Message("system", ""), Message("user", "Grüße, 世界 👩‍👩‍👧 \x00\n")],
        ),
        "decode_greedy": decode(
            rid=RID, agent="coder", prompt=" ", sampling=Sampling(temperature=0.0, seed=0)
        ),
        "decode_full": decode(
            rid=RID,
            agent="coder",
            conversation="side",
            continue_=True,
            messages=[Message("user", "and then?")],
            max_tokens=256,
            sampling=ALL_SAMPLING,
            stop=["\n\n", "###"],
            logit_bias=[(5, -1000.0), (7, 2.5)],
            window=32,
            expect_version=7,
            queue_ms=0,
            timeout_ms=60_000,
            priority=100,
            detach=True,
            return_ids=True,
        ),
    } | structure_cases.requests(RID)


def broker_replies() -> dict[str, msgspec.Struct]:
    """Every message of the broker to a client."""
    m = messages
    return {
        "welcome": m.Welcome(
            v=VERSION, session="s-1", broker_epoch=1, principal="local", heartbeat_ms=2000
        ),
        "welcome_full": m.Welcome(
            v=VERSION,
            session="s-2",
            broker_epoch=1_700_000_000_123_456_789,
            principal="local",
            heartbeat_ms=2000,
            limits={"n_ctx_max": limits.N_CTX_MAX},
            features=["resume"],
        ),
        "ok": m.Ok(rid=RID),
        "ok_body": m.Ok(
            rid=RID,
            body={"text": "x", "n": -1, "big": 2**62, "f": 0.5, "no": None, "l": [True, {"k": []}]},
        ),
        "accepted": m.Accepted(rid=RID, job=1, position=0),
        "accepted_full": m.Accepted(rid=RID, job=2**40, position=3, est_ms=1500),
        "tokens": m.Tokens(rid=RID, seq=0, text="Hi"),
        "tokens_ids": m.Tokens(rid=RID, seq=300, text="👩‍👩‍👧", ids=[9906, 28_705, 151_643]),
        "tokens_empty_text": m.Tokens(rid=RID, seq=1, text="", ids=[2]),
        "done": m.Done(rid=RID, seq=0, usage=Usage()),
        "done_full": m.Done(rid=RID, seq=42, usage=USAGE),
        "error_session": m.Error(
            rid=b"",
            error=ErrorInfo(Code.FAILED_PRECONDITION, "no_session", "say HELLO first"),
        ),
        "error_deny": m.Error(rid=RID, error=DENY),
        "error_after_tokens": m.Error(
            rid=RID,
            error=ErrorInfo(
                Code.UNAVAILABLE, "worker_lost", "the worker died after 12 tokens", True, 1000
            ),
            seq=12,
            usage=Usage(generated_tokens=12, stop_reason="cancelled"),
        ),
        "progress": m.Progress(rid=RID, stage="load"),
        "progress_full": m.Progress(
            rid=RID, stage="estimate", done=512, total=1024, note="reading the vocabulary"
        ),
        "goaway": m.GoAway(reason="shutdown", drain_ms=10_000),
        **drain_cases.answers(RID),
        "pong": m.Pong(),
        "pong_full": m.Pong(n=2**63 - 1),
    } | conversation_cases.answers(RID)


def client_vectors() -> Iterator[Vector]:
    """All of client.json."""
    groups: list[tuple[Direction, dict[str, msgspec.Struct]]] = [
        ("client_to_broker", client_requests() | decode_requests()),
        (
            "broker_to_client",
            broker_replies() | structure_cases.answers(RID) | fit_cases.answers(RID),
        ),
    ]
    for direction, group in groups:
        for name, message in group.items():
            yield Vector(name, direction, CLIENT_TO_BROKER.encode(message))
    yield from _other_encodings()


def _other_encodings() -> Iterator[Vector]:
    """Bytes that we would not write and that every receiver must understand all the same."""
    ping = (
        ("unknown_field", b"\x83\xa1t\xa4PING\xa1n\x07\xa3new\x92\xc3\xa1x", "a newer peer"),
        ("type_not_first", b"\x82\xa1n\x07\xa1t\xa4PING", "maps have no order"),
        ("wide_int", b"\x82\xa1t\xa4PING\xa1n\xcf\0\0\0\0\0\0\0\x07", "7 as uint64"),
        ("wide_str", b"\x82\xd9\x01t\xdb\0\0\0\x04PING\xa1n\x07", "str8 and str32"),
        ("wide_map", b"\xdf\0\0\0\x02\xa1t\xa4PING\xa1n\x07", "map32"),
        ("explicit_default", b"\x82\xa1t\xa4PING\xa1n\x00", "a default may be written out"),
        ("duplicate_key", b"\x83\xa1t\xa4PING\xa1n\x01\xa1n\x07", "the last one counts"),
        (
            "unknown_ext",
            b"\x83\xa1t\xa4PING\xa1n\x07\xa1x\xd4\x05a",
            "ext, but in an unknown field",
        ),
    )
    for name, body, note in ping:
        frames = [limits.PREAMBLE, body]
        yield Vector(f"ping_{name}", "client_to_broker", frames, canonical=False, note=note)
    ints = (
        b"\x85\xa1t\xa6DECODE\xa3rid\xc4\x10" + RID + b"\xa5agent\xa5coder\xa6prompt\xa2hi"
        b"\xa8sampling\x81\xabtemperature\x00"
    )
    nulls = (
        b"\x85\xa1t\xa6DECODE\xa3rid\xc4\x10" + RID + b"\xa5agent\xa5coder\xa6prompt\xa2hi"
        b"\xaamax_tokens\xc0"
    )
    for name, body, note in (
        ("decode_explicit_null", nulls, "null: not given"),
        ("decode_int_for_float", ints, "an int will do where a float is meant"),
    ):
        frames = [limits.PREAMBLE, body]
        yield Vector(name, "client_to_broker", frames, canonical=False, note=note)
