"""Log lines: one line each, nothing secret, never an exception."""

from __future__ import annotations

import io
import json

from vram_conductor.broker.shell.logs import VALUE_CHARS_MAX, Logger


def written(log_format: str, level: str = "info", /, **fields: object) -> str:
    stream = io.StringIO()
    log = Logger(log_format, "info", stream, lambda: 1_700_000_000.25)  # type: ignore[arg-type]
    log(level, "some.event", **fields)
    return stream.getvalue()


def test_text() -> None:
    line = written("text", agent="local/a", bytes=5, why="two words", ok=True, none=None)
    assert line == (
        "2023-11-14T22:13:20.250Z INFO some.event agent=local/a bytes=5 "
        'why="two words" ok=true none=null\n'
    )


def test_json() -> None:
    line = written("json", agent="local/a", rid=bytes(16), event="taken", lines=[("a", 1)])
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "event": "some.event",
        "agent": "local/a",
        "rid": "00" * 16,
        "lines": [["a", 1]],
    }


def test_below_the_level_nothing_is_written() -> None:
    assert written("text", "debug") == ""


def test_prompts_keys_and_token_ids_are_withheld_wherever_they_hide() -> None:
    secret = "tell nobody"
    for log_format in ("text", "json"):
        line = written(
            log_format,
            prompt=secret,
            messages=[{"role": "user", "content": secret}],
            tokens=[987611, 987622],
            nested={"key": secret, "ids": [987633]},
            buffer=secret.encode() * 10,
            generated_tokens=7,
        )
        assert "nobody" not in line
        assert "9876" not in line
        assert "generated_tokens" in line
        assert secret.encode().hex() not in line


def test_a_peers_words_make_no_second_line() -> None:
    for log_format in ("text", "json"):
        line = written(log_format, client="x\n2023-11-14 ERROR forged a=1\r\n\x1b[2J")
        assert line.count("\n") == 1
        assert "\r" not in line
        assert "\x1b" not in line


def test_long_values_are_cut() -> None:
    assert len(written("text", why="y" * 100_000)) < VALUE_CHARS_MAX + 100


def test_a_closed_stream_is_no_reason_to_stop() -> None:
    stream = io.StringIO()
    log = Logger("text", "info", stream)
    stream.close()
    log("error", "nobody.reads")
