"""Requests from Python arguments (*pure*): built, type-checked and limit-checked before they are
sent, so that a mistake raises the same typed error here that the broker would answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec

from vram_conductor.client.session import Timing
from vram_conductor.protocol import limits
from vram_conductor.protocol.codec import CLIENT_TO_BROKER
from vram_conductor.protocol.config import parse_bytes
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.errors import InvalidArgument, OutOfRange
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.messages import Decode, Lease, Register, Reset, Unregister
from vram_conductor.protocol.plain import is_mapping, is_sequence
from vram_conductor.protocol.validate import check
from vram_conductor.protocol.values import KVType, Message, Overflow

Messages = Sequence[Message | Mapping[str, str]]
"""Chat messages: ``{"role": "user", "content": "…"}`` or :class:`Message`."""


class ArrayLike(Protocol):
    """An array of token ids: anything with numpy's ``tolist``."""

    def tolist(self) -> Any: ...


TokenIds = Sequence[int] | ArrayLike
"""Token ids: a list, a tuple, a range, an array."""


class SamplingOptions(TypedDict, total=False):
    """Sampling keywords; ranges and meaning as in ``values.Sampling``. Absent ones inherit."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_last_n: int | None
    seed: int | None


class RegisterOptions(SamplingOptions, total=False):
    """Keywords of ``register``; see ``messages.Register``.

    n_ctx: guaranteed context in tokens (default: the broker's, or what the model was trained with
    if that is less). kv_type: ``f16``, ``q8_0``, ``q4_0``, ``f32`` (default: the broker's).
    device: ``cuda:0``, ``cpu`` … (default: best fit). ephemeral: unregister at the end of the
    session. ttl_s: unregister after so many idle seconds. linger_s: the weights leave the device
    after so many seconds without a job, and stay for so many after the last agent has gone.
    """

    n_ctx: int | None
    kv_type: KVType | None
    device: str | None
    slots: int
    priority: int
    ephemeral: bool
    ttl_s: int | None
    linger_s: int | None


class DecodeOptions(SamplingOptions, total=False):
    """Keywords of ``chat`` and ``decode``; see ``messages.Decode``.

    conversation: ``main`` unless named. max_tokens: default until the context is full. stop: one
    or more stop strings. logit_bias: token id → bias. window: how many pieces the broker may send
    ahead of the reader (>= 1; None: all). expect_version: fail unless the conversation has this
    version. queue_ms, timeout_ms: give up if not started, not finished, within so many
    milliseconds. grammar: GBNF that the answer follows. json_schema: the answer is JSON that is
    valid by it; at most one of both. detach: go on when this program is gone. return_ids: token
    ids beside the text.
    """

    conversation: str
    max_tokens: int | None
    stop: str | Sequence[str]
    grammar: str | None
    json_schema: Mapping[str, Any] | None
    logit_bias: Mapping[int, float]
    window: int | None
    expect_version: int | None
    queue_ms: int | None
    timeout_ms: int | None
    priority: int | None
    detach: bool
    return_ids: bool
    overflow: Overflow


class LeaseOptions(TypedDict, total=False):
    """Keywords of ``lease``; see ``messages.Lease``.

    ttl_s: it ends by itself after so many seconds (default 60, at most 3600); in a ``with`` block
    it is renewed before. device: ``cuda:0``, ``cpu`` … (default: where the most is left). park:
    agents may have to wait for it (default); False: only what no agent was promised. ephemeral: it
    ends with this connection, too.
    """

    ttl_s: int
    device: str | None
    park: bool
    ephemeral: bool


R = TypeVar("R", Register, Unregister, Reset, Fork, History, Lease, Decode, Fit)

_SAMPLING = frozenset(SamplingOptions.__annotations__)


def build_register(
    rid: bytes, agent: str, model: str, **options: Unpack[RegisterOptions]
) -> Register:
    """A checked REGISTER.

    Raises:
        TypeError: an unknown keyword.
        InvalidArgument, OutOfRange: a wrong type or value; ``details["field"]`` names it.
    """
    fields = _split(options, RegisterOptions, "register")
    return _build(Register, {"rid": rid, "agent": agent, "model": model, **fields})


def build_unregister(rid: bytes, agent: str, principal: str | None = None) -> Unregister:
    """A checked UNREGISTER."""
    return _build(Unregister, {"rid": rid, "agent": agent, "principal": principal})


def build_reset(rid: bytes, agent: str, conversation: str, *, forget: bool = False) -> Reset:
    """A checked RESET."""
    fields = {"rid": rid, "agent": agent, "conversation": conversation, "forget": forget}
    return _build(Reset, fields)


def build_fork(
    rid: bytes, agent: str, conversation: str, to: str, expect_version: int | None
) -> Fork:
    """A checked FORK."""
    fields = {"rid": rid, "agent": agent, "conversation": conversation, "to": to}
    return _build(Fork, {**fields, "expect_version": expect_version})


def checked(message: R) -> R:
    """The message, when it has been checked as the others are."""
    return _build(type(message), msgspec.structs.asdict(message))


def build_lease(rid: bytes, name: str, size: int | str, **options: Unpack[LeaseOptions]) -> Lease:
    """A checked LEASE. ``size``: bytes, or a text such as ``"3 GB"``.

    Raises:
        TypeError: an unknown keyword.
        InvalidArgument, OutOfRange: a wrong type or value; ``bad_size``.
    """
    fields = _split(options, LeaseOptions, "lease")
    count = parse_bytes(size) if isinstance(size, str) else size
    return _build(Lease, {"rid": rid, "name": name, "bytes": count, **fields})


def build_release(rid: bytes, name: str, whose: str | None = None) -> Lease:
    """A checked LEASE that ends one. ``whose``: a principal, for an admin."""
    return _build(Lease, {"rid": rid, "name": name, "release": not whose, "principal": whose})


def build_decode(
    rid: bytes,
    agent: str,
    *,
    continue_: bool = False,
    prompt: str | None = None,
    messages: Messages | None = None,
    tokens: TokenIds | None = None,
    **options: Unpack[DecodeOptions],
) -> Decode:
    """A checked DECODE. Exactly one of ``prompt``, ``messages``, ``tokens``.

    Raises:
        TypeError: an unknown keyword.
        InvalidArgument, OutOfRange, Unimplemented: a wrong type or value.
    """
    fields = _split(options, DecodeOptions, "decode")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if is_mapping(bias := fields.get("logit_bias")):
        fields["logit_bias"] = list(bias.items())
    if fields.get("window") == 0:
        raise InvalidArgument(
            "bad_value", "window must be at least 1 (it is 0)", field="window", value=0
        )
    inputs = {"prompt": prompt, "messages": messages, "tokens": tokens}
    return _build(Decode, {"rid": rid, "agent": agent, "continue": continue_, **inputs, **fields})


def chat_input(text_or_messages: str | Messages, system: str | None) -> tuple[Messages, bool]:
    """The messages of a chat turn, and whether they are appended to the conversation.

    A text is the user's next message, after ``system`` if given. A list is the whole
    conversation.
    """
    if not isinstance(text_or_messages, str):
        if system is not None:
            raise InvalidArgument(
                "bad_input",
                "system goes with a text; put it into the list of messages instead",
                field="system",
            )
        return text_or_messages, False
    head = [] if system is None else [Message("system", system)]
    return [*head, Message("user", text_or_messages)], True


def timing(connect_timeout_s: float, reconnect_s: float) -> Timing:
    """Patience of a connection, given in seconds. Raises InvalidArgument ``bad_value``."""
    return Timing(
        connect_ms=checked_timeout_ms("connect_timeout_s", connect_timeout_s),
        reconnect_ms=checked_timeout_ms("reconnect_s", reconnect_s),
    )


def checked_timeout_ms(field: str, seconds: float) -> int:
    """Seconds → milliseconds.

    Raises:
        InvalidArgument: ``bad_value``: not a number above 0.
        OutOfRange: ``limit_exceeded``.
    """
    number = isinstance(seconds, int | float)  # pyright: ignore[reportUnnecessaryIsInstance]
    number = number and not isinstance(seconds, bool)  # callers need not be typed
    if not number or not seconds > 0:
        raise InvalidArgument(
            "bad_value", f"{field} must be above 0 (it is {seconds!r})", field=field
        )
    if seconds * 1000 > limits.TIME_MS_MAX:
        raise OutOfRange(
            "limit_exceeded",
            f"{field} is {seconds}, the limit is {limits.TIME_MS_MAX // 1000}",
            field=field,
            value=seconds,
            limit=limits.TIME_MS_MAX // 1000,
        )
    return max(1, round(seconds * 1000))


def _split(options: Mapping[str, Any], known: type, function: str) -> dict[str, Any]:
    """Keyword arguments as fields: sampling ones move into ``sampling``."""
    names = _option_names(known)
    for name in options:
        if name not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    fields = {name: value for name, value in options.items() if name not in _SAMPLING}
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    return {**fields, "sampling": sampling} if sampling else fields


def _option_names(known: type) -> frozenset[str]:
    own = frozenset(known.__annotations__)
    return own if known is LeaseOptions else own | _SAMPLING


def _build(message_type: Callable[..., R], fields: dict[str, Any]) -> R:
    """Type-check, limit-check and size-check.

    Lists and dicts are copied, so that the caller may change his afterwards.
    """
    given = {name: _plain(value) for name, value in fields.items() if value is not None}
    try:
        message: R = msgspec.convert(given, message_type)
    except (msgspec.ValidationError, TypeError) as error:
        text = str(error)
        field = text.partition("`$.")[2].rstrip("`").partition(".")[0].partition("[")[0]
        raise InvalidArgument("bad_value", f"wrong type: {text}", field=field) from None
    check(message)
    map_bytes = len(CLIENT_TO_BROKER.encode(message)[1])
    if map_bytes > limits.MAP_BYTES_MAX:
        raise OutOfRange(
            "limit_exceeded",
            f"the request has {map_bytes} bytes, the limit is {limits.MAP_BYTES_MAX}; send less "
            "text, or append to the conversation instead of sending all of it",
            field="request",
            value=map_bytes,
            limit=limits.MAP_BYTES_MAX,
        )
    return message


def _plain(value: Any) -> Any:
    """Sequences of any kind as lists; numpy's and the like by their ``tolist``."""
    if isinstance(value, str | bytes | int | float | dict):
        return cast(Any, value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if is_sequence(value) else value
