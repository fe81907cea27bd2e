"""Checks of client requests against the limits. *Pure.*

One function per message type, and ``check`` for any; they return nothing or raise. A value that
is wrong under any limit is INVALID_ARGUMENT; one that is merely above a limit is OUT_OF_RANGE
``limit_exceeded``. ``details`` holds ``field``, ``value`` (of texts: their length) and the limit
or range. What needs the model (token ids against the vocabulary, prompt against n_ctx) is
checked where the model is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram_conductor.protocol import limits
from vram_conductor.protocol.check import (
    check_name,
    check_number,
    check_range,
    check_rid,
    check_size,
    check_text,
)
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.drain import DrainDevice, check_drain
from vram_conductor.protocol.errors import InvalidArgument, Unimplemented
from vram_conductor.protocol.fitting import Fit, check_fit
from vram_conductor.protocol.leasing import Lease, check_lease
from vram_conductor.protocol.messages import (
    Bye,
    Cancel,
    ClientMessage,
    Credit,
    Decode,
    Hello,
    List,
    Ping,
    Register,
    Reset,
    Resume,
    Status,
    Unregister,
)
from vram_conductor.protocol.structure import check_structure
from vram_conductor.protocol.values import Message, Sampling


def check(message: ClientMessage) -> None:
    """Check any client message.

    Raises:
        InvalidArgument: ``bad_rid``, ``bad_name``, ``bad_value``, ``bad_input``, ``empty_input``.
        OutOfRange: ``limit_exceeded``.
        Unimplemented: ``unsupported_version``, ``unsupported_overflow``.
    """
    _CHECKS[type(message)](message)


def check_hello(message: Hello) -> None:
    """The major version is equal; texts are short."""
    major, minor = message.v
    check_range("v[0]", major, 0, limits.SEQ_MAX)
    check_range("v[1]", minor, 0, limits.SEQ_MAX)
    if major != limits.PROTOCOL_MAJOR:
        raise Unimplemented(
            "unsupported_version",
            f"the client speaks protocol {major}, the broker {limits.PROTOCOL_MAJOR}; "
            "upgrade the older one",
            theirs=major,
            ours=limits.PROTOCOL_MAJOR,
        )
    check_text("client", message.client, limits.CLIENT_CHARS_MAX)
    check_size("features", len(message.features), limits.FEATURES_MAX)
    for index, feature in enumerate(message.features):
        check_name(f"features[{index}]", feature)


def check_register(message: Register) -> None:
    """Names, n_ctx, slots, priority, sampling, ttl_s, linger_s."""
    check_rid(message.rid)
    check_name("agent", message.agent)
    check_text("model", message.model, limits.MODEL_CHARS_MAX, empty=False, printable=True)
    if message.n_ctx is not None:
        check_range("n_ctx", message.n_ctx, 1, limits.N_CTX_MAX)
    if message.device is not None:
        check_name("device", message.device)
    check_range("slots", message.slots, 1, limits.SLOTS_MAX)
    check_number("priority", message.priority, -limits.PRIORITY_MAX, limits.PRIORITY_MAX)
    check_sampling(message.sampling)
    if message.ttl_s is not None:
        check_range("ttl_s", message.ttl_s, 1, limits.TTL_S_MAX)
    if message.linger_s is not None:
        check_range("linger_s", message.linger_s, 0, limits.LINGER_S_MAX)


def check_unregister(message: Unregister) -> None:
    check_rid(message.rid)
    check_name("agent", message.agent)
    if message.principal is not None:
        check_name("principal", message.principal)


def check_decode(message: Decode) -> None:
    """Names, exactly one input and its size, sampling, stop, bias, window, version, times."""
    check_rid(message.rid)
    check_name("agent", message.agent)
    check_name("conversation", message.conversation)
    _check_input(message)
    if message.max_tokens is not None:
        check_range("max_tokens", message.max_tokens, 1, limits.MAX_TOKENS_MAX)
    check_sampling(message.sampling)
    _check_stop(message.stop)
    check_structure(message.grammar, message.json_schema)
    _check_bias(message.logit_bias)
    for field, value, least, most in (
        ("window", message.window, 0, limits.SEQ_MAX),
        ("expect_version", message.expect_version, 0, limits.VERSION_MAX),
        ("queue_ms", message.queue_ms, 0, limits.TIME_MS_MAX),
        ("timeout_ms", message.timeout_ms, 1, limits.TIME_MS_MAX),
    ):
        if value is not None:
            check_range(field, value, least, most)
    if message.priority is not None:
        check_number("priority", message.priority, -limits.PRIORITY_MAX, limits.PRIORITY_MAX)
    if message.overflow != "error":
        raise Unimplemented(
            "unsupported_overflow",
            f"overflow={message.overflow!r} is not offered; leave it at 'error'",
            field="overflow",
            value=message.overflow,
        )


def check_credit(message: Credit) -> None:
    check_rid(message.rid)
    check_range("ack", message.ack, 0, limits.SEQ_MAX)
    check_range("upto", message.upto, 0, limits.SEQ_MAX)


def check_cancel(message: Cancel) -> None:
    check_rid(message.rid)


def check_resume(message: Resume) -> None:
    check_rid(message.rid)
    check_range("from_seq", message.from_seq, 0, limits.SEQ_MAX)
    if message.window is not None:
        check_range("window", message.window, 0, limits.SEQ_MAX)


def check_reset(message: Reset) -> None:
    check_rid(message.rid)
    check_name("agent", message.agent)
    check_name("conversation", message.conversation)


def check_fork(message: Fork) -> None:
    """Names, version."""
    check_rid(message.rid)
    check_name("agent", message.agent)
    check_name("conversation", message.conversation)
    check_name("to", message.to)
    _check_version(message.expect_version)


def check_history(message: History) -> None:
    """Names, where to begin, version."""
    check_rid(message.rid)
    check_name("agent", message.agent)
    check_name("conversation", message.conversation)
    check_range("from_turn", message.from_turn, 0, limits.SEQ_MAX)
    if message.from_token is not None:
        check_range("from_token", message.from_token, 0, limits.SEQ_MAX)
    _check_version(message.expect_version)


def _check_version(version: int | None) -> None:
    if version is not None:
        check_range("expect_version", version, 0, limits.VERSION_MAX)


def check_sampling(sampling: Sampling) -> None:
    """Ranges of :class:`Sampling`; NaN and infinities are refused. None is always right."""
    for field, least, most, above in _SAMPLING:
        value = getattr(sampling, field)
        if value is not None:
            check_number(f"sampling.{field}", value, least, most, above=above)


_SAMPLING: tuple[tuple[str, float, float, bool], ...] = (
    # field, least, most, whether the value must be above the least
    ("temperature", 0.0, limits.TEMPERATURE_MAX, False),
    ("top_k", 0, limits.TOKEN_ID_MAX, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repeat_penalty", 0.0, limits.REPEAT_PENALTY_MAX, True),
    ("presence_penalty", -limits.PENALTY_MAX, limits.PENALTY_MAX, False),
    ("frequency_penalty", -limits.PENALTY_MAX, limits.PENALTY_MAX, False),
    ("penalty_last_n", -1, limits.N_CTX_MAX, False),
    ("seed", 0, limits.SEED_MAX, False),
)


def _check_input(message: Decode) -> None:
    inputs = {"messages": message.messages, "prompt": message.prompt, "tokens": message.tokens}
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        raise InvalidArgument(
            "bad_input",
            "give exactly one of messages, prompt and tokens, not "
            + (" and ".join(given) or "none of them"),
            field="messages",
            value=given,
        )
    field = given[0]
    if not inputs[field]:
        raise InvalidArgument(
            "empty_input", f"{field} is empty; send at least one", field=field, value=0
        )
    if message.messages is not None:
        _check_messages(message.messages)
    elif message.prompt is not None:
        check_text("prompt", message.prompt, limits.PROMPT_CHARS_MAX)
    elif message.tokens is not None:
        check_size("tokens", len(message.tokens), limits.PROMPT_TOKENS_MAX)
        # The extremes first: a loop over a million ids would stall the broker.
        if not 0 <= min(message.tokens) <= max(message.tokens) <= limits.TOKEN_ID_MAX:
            for index, token in enumerate(message.tokens):
                check_number(f"tokens[{index}]", token, 0, limits.TOKEN_ID_MAX)


def _check_messages(messages: list[Message]) -> None:
    check_size("messages", len(messages), limits.MESSAGES_MAX)
    chars = 0
    for index, message in enumerate(messages):
        role = f"messages[{index}].role"
        check_text(role, message.role, limits.ROLE_CHARS_MAX, empty=False, printable=True)
        check_text(f"messages[{index}].content", message.content, limits.PROMPT_CHARS_MAX)
        chars += len(message.role) + len(message.content)
    check_size("messages", chars, limits.PROMPT_CHARS_MAX, unit="characters")


def _check_stop(stop: list[str]) -> None:
    check_size("stop", len(stop), limits.STOP_STRINGS_MAX)
    for index, text in enumerate(stop):
        check_text(f"stop[{index}]", text, limits.STOP_STRING_CHARS_MAX, empty=False)


def _check_bias(pairs: list[tuple[int, float]]) -> None:
    check_size("logit_bias", len(pairs), limits.LOGIT_BIAS_MAX)
    for index, (token, bias) in enumerate(pairs):
        check_number(f"logit_bias[{index}][0]", token, 0, limits.TOKEN_ID_MAX)
        check_number(f"logit_bias[{index}][1]", bias, -limits.BIAS_MAX, limits.BIAS_MAX)


def _check_rid_only(message: List | Status) -> None:
    check_rid(message.rid)


def _check_ping(message: Ping) -> None:
    check_number("n", message.n, 0, limits.VERSION_MAX)


def _check_nothing(message: Bye) -> None:
    """BYE has no fields."""


_CHECKS: dict[type, Callable[[Any], None]] = {
    Hello: check_hello,
    Register: check_register,
    Unregister: check_unregister,
    Fit: check_fit,
    List: _check_rid_only,
    Status: _check_rid_only,
    Decode: check_decode,
    Credit: check_credit,
    Cancel: check_cancel,
    Resume: check_resume,
    Reset: check_reset,
    Fork: check_fork,
    History: check_history,
    Lease: check_lease,
    DrainDevice: check_drain,
    Ping: _check_ping,
    Bye: _check_nothing,
}
