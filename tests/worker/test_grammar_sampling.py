"""Grammars with real vocabularies: the same as llama.cpp allows, and what is sampled of it."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chats import GREEDY, ids_of, prefill
from gguf_models import Spec, make_model
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import Code, ConductorError
from vram_conductor.protocol.values import PoolShape, Sampling
from vram_conductor.worker.engine import Sampler, Tokens
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.llama.binding import unannotated
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.pool import LlamaPool

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

GRAMMARS = {
    "json": r"""
root ::= value
value ::= (object | array | string | number | "true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}"
array ::= "[" ws (value ("," ws value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-f]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= | " " | "\n" [ \t]{0,20}
""",
    "sums": 'root ::= e\ne ::= t | t " + " e\nt ::= "(" e ")" | [a-zé]+ ("." [a-z]+)*',
    "counted": 'root ::= "\\"" [^"\\x00]{0,60} "\\""',
}
TEXTS = {
    "json": '{"näme": [1, 2.5e3, "a\\u00e9 日本語 😀"], "o": {}}',
    "sums": "(ab + (c.dd + x)) + été.y",
    "counted": '"hello world 日本"',
}


@pytest.fixture(scope="module")
def smol(engine: LlamaEngine, smollm2: Path) -> Iterator[LlamaModel]:
    model = engine.load(str(smollm2), "smol")
    yield model
    model.close()


@pytest.fixture(scope="module")
def pool(smol: LlamaModel) -> Iterator[LlamaPool]:
    pool = smol.open_pool(PoolShape(512, 2))
    yield pool
    pool.close()


def constraint_of(model: LlamaModel, grammar: str) -> Constraint:
    found = model._vocabulary.constraint(grammar, None)
    assert found is not None
    return found


class LlamaGrammar:
    """llama.cpp's own grammar sampler, the reference."""

    def __init__(self, model: LlamaModel, grammar: str) -> None:
        self.n_vocab = model.info.n_vocab
        self.sampler = ll.llama_sampler_init_grammar(
            model._vocabulary._vocab, grammar.encode(), b"root"
        )
        assert self.sampler, "a null pointer is false"

    def allowed(self) -> Tokens:
        kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        rows = np.zeros(self.n_vocab, kind)
        rows["id"] = np.arange(self.n_vocab)
        pointer = ctypes.cast(rows.ctypes.data, ctypes.POINTER(ll.llama_token_data))
        array = ll.llama_token_data_array(pointer, self.n_vocab, -1, False)
        unannotated.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return np.flatnonzero(np.isfinite(rows["logit"])).astype(np.int32)

    def accept(self, token: int) -> None:
        ll.llama_sampler_accept(self.sampler, token)

    def close(self) -> None:
        ll.llama_sampler_free(self.sampler)


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_tokens_as_llama_cpp_allows(smol: LlamaModel, name: str) -> None:
    """But for control tokens, which have no text here, so none that follows a grammar."""
    ours, theirs = constraint_of(smol, GRAMMARS[name]), LlamaGrammar(smol, GRAMMARS[name])
    for token in smol.tokenize(TEXTS[name], first=False).tolist():
        reference = [
            t for t in theirs.allowed().tolist() if smol.piece(t, special=False) or smol.is_eog(t)
        ]
        assert ours.allowed().tolist() == reference
        assert ours.allows(token)
        ours.accept(token)
        theirs.accept(token)
    assert any(smol.is_eog(token) for token in ours.allowed().tolist())
    theirs.close()


def logits_of(pool: LlamaPool, slot: int, n_vocab: int) -> np.ndarray[Any, Any]:
    row = ll.llama_get_logits_ith(pool._context, pool._batch.last[slot])
    return np.ctypeslib.as_array(row, (n_vocab,)).copy()


def test_greedy_takes_the_best_of_what_is_allowed(smol: LlamaModel, pool: LlamaPool) -> None:
    sampler = smol.sampler(GREEDY, [], 0, grammar=GRAMMARS["json"])
    beside = constraint_of(smol, GRAMMARS["json"])
    prompt = smol.tokenize("The capital of France as JSON:", first=True)
    prefill(pool, 0, prompt)
    unlike = 0
    for position in range(len(prompt), len(prompt) + 24):
        row = logits_of(pool, 0, smol.info.n_vocab)
        allowed = beside.allowed()
        token = pool.sample(0, sampler)
        assert token == allowed[row[allowed].argmax()]
        unlike += token != int(row.argmax())
        if smol.is_eog(token):
            break
        beside.accept(token)
        pool.decode([(0, ids_of(token), position, True)])
    assert unlike, "a grammar that changes nothing proves nothing"
    pool.truncate(0, 0)
    sampler.close()


def generate(
    model: LlamaModel, pool: LlamaPool, samplers: list[Sampler], prompt: str, most: int = 200
) -> list[bytes]:
    """Answers of several sequences in one batch, until each is at its end."""
    ids = model.tokenize(prompt, first=True)
    texts = [b""] * len(samplers)
    nexts: dict[int, int] = {}
    for slot, sampler in enumerate(samplers):
        prefill(pool, slot, ids)
        nexts[slot] = pool.sample(slot, sampler)
    for position in range(len(ids), len(ids) + most):
        for slot, token in list(nexts.items()):
            texts[slot] += model.piece(token, special=False)
            if model.is_eog(token) or samplers[slot].finished:
                del nexts[slot]
        if not nexts:
            break
        pool.decode([(slot, ids_of(token), position, True) for slot, token in nexts.items()])
        nexts = {slot: pool.sample(slot, samplers[slot]) for slot in nexts}
    for slot, sampler in enumerate(samplers):
        pool.truncate(slot, 0)
        sampler.close()
    assert not nexts, "they come to an end"
    return texts


PERSON = {
    "type": "object",
    "properties": {
        'na"me\\': {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"\\', "é", None]}, "maxItems": 3},
    },
    "required": ['na"me\\', "age", "tags"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        list(value) == ['na"me\\', "age", "tags"]
        and len(value['na"me\\']) <= 12
        and type(value["age"]) is int
        and all(tag in ("a", 'b"\\', "é", None) for tag in value["tags"])
        and len(value["tags"]) <= 3
    )


@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_sequences_of_one_batch_follow_their_own_grammars(
    smol: LlamaModel, pool: LlamaPool, seed: int
) -> None:
    hot = Sampling(temperature=1.8, top_k=0, top_p=1.0, min_p=0.0)
    first = smol.sampler(hot, [], seed, json_schema=PERSON)
    second = smol.sampler(Sampling(temperature=1.2), [], seed + 1, grammar="root ::= [A-F]{9}")
    person, letters = generate(smol, pool, [first, second], "Somebody:", most=400)
    assert is_person(json.loads(person)), person
    assert len(letters) == 9
    assert set(letters) <= set(b"ABCDEF")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=3.0, top_k=40, top_p=1.0, min_p=0.0),
        Sampling(temperature=3.0, top_k=200, top_p=1.0, min_p=0.0),
        Sampling(temperature=0.9, top_k=40, repeat_penalty=1.3),
        Sampling(temperature=0.0, repeat_penalty=1.3),
    ],
    ids=["top 40", "top 200", "penalties", "greedy with penalties"],
)
def test_a_short_look_finds_what_a_long_one_finds(
    smol: LlamaModel, pool: LlamaPool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the best tokens only a few are allowed: fewer than the chain would keep.
    grammar = 'root ::= "\\"" ([A-Z] [a-z]{2,9} "-"){4} [^"\\x00-\\x1f]{10,20} "\\""'

    def answers() -> list[bytes]:
        return [
            generate(smol, pool, [smol.sampler(sampling, [], seed, grammar=grammar)], "Say:")[0]
            for seed in (7, 8, 9)
        ]

    quick = answers()
    monkeypatch.setattr("vram_conductor.worker.llama.sampler._LOOK", 1 << 30)
    assert quick == answers()


def test_a_character_that_no_token_can_say_is_a_dead_end(smol: LlamaModel, pool: LlamaPool) -> None:
    """No text has half of a surrogate pair."""
    sampler = smol.sampler(GREEDY, [], 0, grammar='root ::= "ok" [\\uD800-\\uD801]')
    prompt = smol.tokenize("Is it?", first=True)
    prefill(pool, 0, prompt)
    position, said = len(prompt), b""
    while said != b"ok":
        token = pool.sample(0, sampler)
        said += smol.piece(token, special=False)
        assert b"ok".startswith(said)
        pool.decode([(0, ids_of(token), position, True)])
        position += 1
    with pytest.raises(ConductorError) as caught:
        pool.sample(0, sampler)
    assert (caught.value.code, caught.value.reason) == (
        Code.FAILED_PRECONDITION,
        "grammar_dead_end",
    )
    pool.truncate(0, 0)
    sampler.close()


def test_five_hundred_optional_properties_are_followed(smol: LlamaModel) -> None:
    """Where a value may end any of them may follow: the costliest of what is harmless."""
    names = [f"p{number}" for number in range(500)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    for seed in range(3):
        constraint = smol._vocabulary.constraint(None, schema)
        assert constraint is not None
        chance, text = random.Random(seed), b""
        for _ in range(80):
            tokens = constraint.allowed().tolist()
            pieces = {token: smol.piece(token, special=False) for token in tokens}
            on = [token for token in tokens if pieces[token] and b"}" not in pieces[token]]
            if not on:
                break
            token = chance.choice(on)
            constraint.accept(token)
            text += pieces[token]
        assert text.count(b":") > 3, text


def test_a_model_without_a_vocabulary_says_nothing_by_a_grammar(engine: LlamaEngine) -> None:
    model = engine.load(str(make_model(Spec())), "bare")
    with pytest.raises(ConductorError, match="no_vocabulary"):
        model.sampler(GREEDY, [], 0, grammar='root ::= "a"')
    assert model.sampler(GREEDY, [], 0).finished is False
    model.close()
