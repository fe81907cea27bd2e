"""Answers that follow a grammar or a JSON schema, on the real path: every one of them is valid, and
whatever cannot be followed is refused and disturbs nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from gguf_models import Spec
from scene import MIB, SMOL, WAIT_S, Scene, model, refusal, some_tokens, until, with_bystander

from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.limits import GRAMMAR_BYTES_MAX

BYTES = Spec(vocab="bytes", seed=5)
PROMPT = "Describe a person as JSON.\n"
PERSON: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 16},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"\\', "é"]}, "maxItems": 3},
        "of": {"anyOf": [{"$ref": "#/$defs/town"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "of"],
    "additionalProperties": False,
    "$defs": {
        "town": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 8}},
            "required": ["town"],
        }
    },
}


def check_person(text: str) -> None:
    """What PERSON says, in other words."""
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "of"], text
    assert 1 <= len(value["name"]) <= 16, text
    assert type(value["age"]) is int, text
    assert len(value["tags"]) <= 3, text
    assert set(value["tags"]) <= {"a", 'b"\\', "é"}, text
    town = value["of"]
    assert town is None or (list(town) == ["town"] and len(town["town"]) <= 8), text


@pytest.fixture(scope="module")
def talk() -> Iterator[Scene]:
    """SmolLM2 with two agents that share one slot, and a bystander."""
    with Scene(StageDevice(capacity_bytes=420 * MIB, host_cap_bytes=256 * MIB)) as scene:
        with_bystander(scene)
        for name in ("writer", "other"):
            scene.conductor.register(name, SMOL, n_ctx=1024)
        scene.conductor.register("bytes", model(BYTES), n_ctx=1024)
        scene.conductor.register("bare", model(Spec()), n_ctx=256)
        yield scene


def write(scene: Scene, agent: str = "writer", **options: Any) -> Reply:
    given: dict[str, Any] = {"max_tokens": 600, **options}
    return scene.conductor.decode(agent, prompt=PROMPT, **given)


@pytest.mark.parametrize("seed", range(8))
def test_every_answer_is_valid_whatever_the_seed(talk: Scene, seed: int) -> None:
    temperature = (0.0, 0.7, 1.5, 3.0)[seed % 4]
    for agent in ("writer", "bytes"):
        reply = write(talk, agent, json_schema=PERSON, seed=seed, temperature=temperature, top_k=0)
        result = reply.result(WAIT_S)
        # A number may have sixteen digits, a string as many characters: it always ends.
        assert result.usage.stop_reason in ("grammar", "eos"), result.text
        check_person(result.text)


def test_it_ends_when_nothing_more_may_follow(talk: Scene) -> None:
    date = 'root ::= [12] [0-9]{3} "-" [01] [0-9]'
    for agent in ("writer", "bytes"):
        result = write(talk, agent, grammar=date, seed=1).result(WAIT_S)
        assert re.fullmatch(r"[12]\d{3}-[01]\d", result.text)
        assert result.usage.stop_reason == "grammar"
        again = write(talk, agent, grammar=date, seed=1).result(WAIT_S)
        assert (again.text, again.usage.seed) == (result.text, 1)


def test_limits_and_stop_strings_still_end_an_answer(talk: Scene) -> None:
    short = write(talk, grammar="root ::= [a-z]+", max_tokens=5, logit_bias={2: -1000.0})
    assert short.result(WAIT_S).usage.stop_reason in ("length", "eos")
    stopped = write(talk, "bytes", grammar='root ::= [ab]{200} "c"', stop="b").result(WAIT_S)
    assert stopped.usage.stop_reason == "stop"
    assert set(stopped.text) <= {"a"}


BOMBS = {
    "sixty thousand parentheses": "root ::= " + "(" * 60_000 + '"a"',
    "deep": "root ::= " + "(" * 101 + '"a"' + ")" * 101,
    "repeated a hundred thousand times": 'root ::= "a"{0,100000}',
    "repetitions of repetitions": 'root ::= ((("a"{999}){999}){999}){999}',
    "a giant alternation": "root ::= " + " | ".join(["[a]"] * 10_900),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_bomb_costs_its_sender_only(talk: Scene, name: str) -> None:
    with talk.undisturbed():
        error = refusal(lambda: write(talk, grammar=BOMBS[name]).result(WAIT_S))
        ambiguous = name == "a giant alternation"
        assert error.reason == ("grammar_too_ambiguous" if ambiguous else "grammar_too_complex")
        assert error.details["limit"]


AMBIGUOUS = {
    "exponential": 'root ::= "a" x\nx ::= "a" x "b" | "a" x "c" | "d"',
    "left-recursive": 'root ::= root root | "a"',
    "left-recursive behind nothing": 'root ::= e root "a" | "a"\ne ::= "a"?',
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_grammar_is_simply_followed(talk: Scene, name: str) -> None:
    """llama.cpp's memory doubles with every letter of the first; the last ends its process."""
    with talk.undisturbed():
        result = write(talk, "bytes", grammar=AMBIGUOUS[name], max_tokens=60).result(WAIT_S)
        assert set(result.text) <= set("abcd")


def _result(scene: Scene, options: dict[str, Any]) -> Result:
    return write(scene, **options).result(WAIT_S)


def test_what_cannot_be_followed_is_refused_and_never_ignored(talk: Scene) -> None:
    cases: list[tuple[dict[str, Any], Code, str, str]] = [
        ({"grammar": "root = x"}, Code.INVALID_ARGUMENT, "bad_grammar", "line 1"),
        ({"grammar": 'a ::= "b"'}, Code.INVALID_ARGUMENT, "bad_grammar", "root"),
        ({"grammar": "root ::= nobody"}, Code.INVALID_ARGUMENT, "bad_grammar", "nobody"),
        ({"grammar": "root ::= root"}, Code.INVALID_ARGUMENT, "bad_grammar", "never"),
        ({"grammar": ""}, Code.INVALID_ARGUMENT, "bad_value", "empty"),
        ({"grammar": "#" * (GRAMMAR_BYTES_MAX + 1)}, Code.OUT_OF_RANGE, "limit_exceeded", "65536"),
        ({"grammar": "root ::= .", "json_schema": {}}, Code.INVALID_ARGUMENT, "bad_input", "both"),
        (
            {"json_schema": {"type": "string", "pattern": "^a$"}},
            Code.UNIMPLEMENTED,
            "unsupported_json_schema",
            "pattern",
        ),
        (
            {"json_schema": {"items": {"type": "integer", "minimum": 3}}},
            Code.UNIMPLEMENTED,
            "unsupported_json_schema",
            "#/items: minimum",
        ),
        ({"json_schema": {"type": "nothing"}}, Code.INVALID_ARGUMENT, "bad_json_schema", "type"),
        (
            {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
            Code.INVALID_ARGUMENT,
            "bad_json_schema",
            "never",
        ),
        (
            {"json_schema": {"type": "string", "maxLength": 10_001}},
            Code.OUT_OF_RANGE,
            "grammar_too_complex",
            "10000",
        ),
    ]
    with talk.undisturbed():
        version = write(talk, max_tokens=1).result(WAIT_S).usage.state_version
        for options, code, reason, says in cases:
            error = refusal(partial(_result, talk, options))
            assert (error.code, error.reason) == (code, reason), error
            assert says in error.message, error
        # Nothing of it is in the conversation, and a model without a vocabulary says so.
        after = write(talk, max_tokens=1, expect_version=version).result(WAIT_S)
        assert after.usage.state_version == version + 1
        job = talk.conductor.decode("bare", tokens=some_tokens(3, 1), grammar="root ::= .")
        error = refusal(lambda: job.result(WAIT_S))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "no_vocabulary")


def test_a_dead_end_fails_its_own_job_and_keeps_what_was_said(talk: Scene) -> None:
    with talk.undisturbed():
        reply = write(talk, grammar='root ::= "certainly" [\\uD800-\\uDFFF]', conversation="dead")
        pieces: list[str] = []
        error = refusal(lambda: pieces.extend(reply))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "grammar_dead_end")
        assert "".join(pieces) == "certainly"
        # The conversation has the word, and goes on.
        more = talk.conductor.decode(
            "writer", prompt=" so", continue_=True, max_tokens=2, conversation="dead"
        ).result(WAIT_S)
        assert more.usage.reused_tokens > 3
        assert more.usage.state_version == 2


LONG = 'root ::= ("<" [a-z]{8} ">\\n"){40}'


def test_a_job_goes_on_in_its_grammar_after_it_was_preempted(talk: Scene) -> None:
    """The two agents share one slot: whoever waits gets it after a slice, and the other's state is
    parked in the middle of its grammar."""
    options: dict[str, Any] = {"grammar": LONG, "seed": 3, "max_tokens": 500}
    alone = write(talk, conversation="alone", **options).result(WAIT_S)
    assert re.fullmatch(r"(<[a-z]{8}>\n){40}", alone.text)
    reply = write(talk, conversation="preempted", **options)
    next(reply)
    other = talk.conductor.decode("other", prompt=PROMPT, grammar="root ::= [0-9]{12}", seed=1)
    assert re.fullmatch(r"\d{12}", other.result(WAIT_S).text)

    def running() -> bool:
        return any(job.agent == "writer" for job in talk.conductor.status().jobs)

    assert running(), "it was preempted in the middle"
    found = reply.result(WAIT_S)
    assert found.text == alone.text
    assert found.usage.swap.restored
    assert found.usage.reprefilled_tokens == 0
    until(lambda: not running(), "it is over")
