"""What a FAILED of our own making tells whoever reports it."""

from __future__ import annotations

import pytest

from vram_conductor.protocol.errors import NotFound
from vram_conductor.worker.lane import Errand
from vram_conductor.worker.origin import origin
from vram_conductor.worker.outbox import info_of
from vram_conductor.worker.tape import Tape


def test_it_names_type_function_and_line() -> None:
    with pytest.raises(AssertionError) as raised:
        Tape().last()
    found = origin(raised.value)
    assert found["error"] == "AssertionError"
    place, line = found["at"].rsplit(":", 1)
    assert place == "worker.tape.Tape.last"
    assert int(line) > 1
    assert "raised_at" not in found


def test_it_names_ours_and_the_one_below() -> None:
    def report(errand: Errand) -> None:
        raise RuntimeError(errand.lane)

    with pytest.raises(RuntimeError) as raised:
        Errand("lane").carry_out(report)
    found = origin(raised.value)
    assert found["at"].startswith("worker.lane.Errand.carry_out:")
    assert "report:" in found["raised_at"]


def test_what_was_never_raised_has_a_type() -> None:
    assert origin(ZeroDivisionError()) == {"error": "ZeroDivisionError"}
    assert info_of(ZeroDivisionError("secret")).reason == "internal_error"


def test_the_message_says_where_and_nothing_that_users_wrote() -> None:
    try:
        raise KeyError("secret prompt")
    except KeyError as error:
        info = info_of(error)
    assert info.details["error"] == "KeyError"
    assert "test_the_message_says_where" in info.details["at"]
    assert info.details["at"] in info.message
    assert "secret" not in info.message
    assert "secret" not in str(info.details)


def test_a_typed_error_travels_as_it_is() -> None:
    error = NotFound("no_such_agent", "nobody")
    assert info_of(error) is error.info
