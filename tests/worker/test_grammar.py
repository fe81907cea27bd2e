"""Grammars without a model: what is refused, what may follow, and that nothing explodes."""

from __future__ import annotations

import gc
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import Code, ConductorError, ResourceExhausted
from vram_conductor.protocol.limits import GRAMMAR_BYTES_MAX
from vram_conductor.worker.grammar import matcher
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.grammar.gbnf import REPEAT_MAX
from vram_conductor.worker.grammar.matcher import Place
from vram_conductor.worker.grammar.rules import DEPTH_MAX
from vram_conductor.worker.grammar.tokens import TokenTexts

BYTES = TokenTexts([b"", *(bytes([value]) for value in range(256))], [0])
"""A token for every byte (id = byte + 1), and an end."""

BOMB_S = 5.0
"""Far above what a refusal takes, far below what an explosion takes."""

JSON = r"""
root ::= value
value ::= (object | array | string | number | "true" | "false" | "null") ws
object ::= "{" ws (pair ("," ws pair)*)? "}"
pair ::= string ws ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-f]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= [ \t\n]*   # as much as one likes
"""


def reads(grammar: str, text: str) -> str:
    """``whole``, ``more`` (it may go on), ``both``, or ``no``."""
    constraint = Constraint(grammar, BYTES)
    for byte in text.encode():
        if not constraint.allows(byte + 1):
            return "no"
        constraint.accept(byte + 1)
    if constraint.allows(0):
        return "whole" if constraint.finished else "both"
    return "more"


def refused(grammar: str) -> ConductorError:
    with pytest.raises(ConductorError) as caught:
        Constraint(grammar, BYTES)
    return caught.value


@pytest.mark.parametrize(
    ("grammar", "text", "verdict"),
    [
        ('root ::= "a"', "a", "whole"),
        ('root ::= "a"', "", "more"),
        ('root ::= "a"', "b", "no"),
        ('root ::= "a" | "ab"', "a", "both"),
        ('root ::= [a-c]{2,3} "!"', "abc!", "whole"),
        ('root ::= [a-c]{2,3} "!"', "a!", "no"),
        ('root ::= [a-c]{2,} "!"', "abcabc!", "whole"),
        ('root ::= [^a]+ "\\n"?', "bé😀", "both"),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\]"', "Aé😀\t]", "whole"),
        ("root ::= .", "\n", "whole"),
        ('root ::= (\n "a" |\n "b" # a comment\n)+', "abba", "both"),
        ('root ::= root "a" | "b"', "baa", "both"),
        ('root ::= e root "x" | "y"\ne ::= "z"?', "zyx", "both"),
        ('root ::= "(" root ")" root | ""', "(()())", "both"),
        ('root ::= "(" root ")" root | ""', "())", "no"),
        ('root ::= x "!"\nx ::= "a" x | "a"', "aaaa!", "whole"),
        ('root ::= ("a"* "b"*)* "c"', "ababc", "whole"),
        ('root ::= ""', "", "whole"),
        ("root ::= [a-]+", "-a", "both"),
        (JSON, '{"a": [1, -2.5e3, "\\u00e9 \\n", {}], "b": null}', "both"),
        (JSON, '{"a": [1,]', "no"),
    ],
)
def test_what_a_grammar_lets_through(grammar: str, text: str, verdict: str) -> None:
    assert reads(grammar, text) == verdict


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("", "no rule named root"),
        ('a ::= "b"', "no rule named root"),
        ("root ::= foo", "line 1: no rule is named foo"),
        ('root ::= "a"\n\nx := "b"', "line 3: ::= is expected"),
        ('root ::= "a', "not closed"),
        ("root ::= [a", "not closed"),
        ("root ::= [b-a]", "ends before it begins"),
        ('root ::= ("a"', ") is expected, not the end"),
        ('root ::= "a")', "line 1: ')' is not expected"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\U00110000"', "unknown escape"),
        ('root ::= "\\x4"', "unknown escape"),
        ('root ::= "a"{x}', "a repetition is"),
        ('root ::= "a"{3,2}', "less than the first"),
        ('root ::= "a"**', "needs parentheses"),
        ('root ::= * "a"', "not expected"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined twice"),
        ("root ::= <[12]>", "not expected"),
        ("root ::= root", "never comes to an end"),
        ('root ::= "a" x\nx ::= "b" x', "never comes to an end"),
    ],
)
def test_what_is_no_grammar(grammar: str, says: str) -> None:
    error = refused(grammar)
    assert (error.info.code, error.reason) == (Code.INVALID_ARGUMENT, "bad_grammar")
    assert says in error.info.message


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 60_000 + '"a"',
        "root ::= " + "(" * (DEPTH_MAX + 1) + '"a"' + ")" * (DEPTH_MAX + 1),
        'root ::= "a"{0,100000}',
        'root ::= "a"{99999999999999999999}',
        'root ::= (("a"{500}){500}){500}',
        'root ::= ((((""{9999}){9999}){9999}){9999}){9999} "a"',
        'root ::= "' + "a" * GRAMMAR_BYTES_MAX + '"',
        "root ::= " + " | ".join(["[a]"] * 15_000),
        'root ::= "' + "é" * (GRAMMAR_BYTES_MAX // 2) + '"',
    ],
    ids=range(9),
)
def test_what_is_too_large(grammar: str) -> None:
    began = time.monotonic()
    error = refused(grammar)
    assert time.monotonic() - began < BOMB_S
    assert (error.info.code, error.reason) == (Code.OUT_OF_RANGE, "grammar_too_complex")
    assert error.details["limit"]


def test_as_deep_and_as_long_as_is_allowed() -> None:
    deep = "root ::= " + "(" * DEPTH_MAX + '"a"' + ")?" * DEPTH_MAX
    assert reads(deep, "a") == "whole"
    words = " | ".join(f'"word{number}"' for number in range(1000))
    assert reads(f"root ::= {words}", "word99") == "both"
    long = "".join(f'r{n} ::= "a" r{n + 1}?\n' for n in range(3000))
    assert reads(f'root ::= r0\n{long}r3000 ::= "z"', "a" * 500) == "both"
    assert reads(f'root ::= "a"{{0,{REPEAT_MAX}}}', "a" * 2000) == "both"
    assert reads(f'root ::= "{"a" * 60_000}" "b"', "a" * 60_000) == "more"


AMBIGUOUS = {
    "two ways back at each depth": 'root ::= "a" x\nx ::= "a" x "b" | "a" x "c" | "d"',
    "sums of sums": 'root ::= root root | "a"',
    "nullable everywhere": 'root ::= x* "!"\nx ::= y y y\ny ::= x | "a"?',
    "stars in stars": 'root ::= ((("a"*)*)* "a"*)* "!"',
    "paths in a net": "".join(f'r{n} ::= r{n + 1} "b" | r{n + 1} "c"\n' for n in range(60))
    + 'r60 ::= "a" r60 | "a"\nroot ::= r0',
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguity_does_not_explode(name: str) -> None:
    """llama.cpp's list of stacks doubles with every letter of the first one, for example: its 16th
    takes ten seconds, its 20th would take an hour."""
    constraint = Constraint(AMBIGUOUS[name], BYTES)
    letter = ord("a") + 1
    began = time.monotonic()
    for _ in range(60):
        assert constraint.allows(letter)
        constraint.accept(letter)
        constraint.allowed()
    assert time.monotonic() - began < BOMB_S


def test_what_is_ambiguous_beyond_measure_is_refused_in_time() -> None:
    """Two thousand ways to go on at every depth; each place remembers many others."""
    ways = " | ".join(f'"a"? "a"{{0,9}} x "{chr(98 + n % 20)}{n}"' for n in range(700))
    constraint = Constraint(f'root ::= x\nx ::= {ways} | "z"', BYTES)
    began = time.monotonic()
    letter = ord("a") + 1

    def go_on() -> None:
        for _ in range(200):
            constraint.allowed()
            constraint.accept(letter)

    with pytest.raises(ResourceExhausted) as caught:
        go_on()
    assert time.monotonic() - began < BOMB_S
    assert caught.value.reason == "grammar_too_ambiguous"


def places() -> int:
    return sum(type(each) is Place for each in gc.get_objects())


def test_what_is_remembered_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text leads to a place of its own, and the later the more there is to it."""
    monkeypatch.setattr(matcher, "KEPT_MAX", 20_000)
    gc.collect()
    before = places()
    constraint = Constraint('root ::= [ab]* "a" [ab]{500} "!"', BYTES)
    most = 0
    for number in range(300):
        constraint.allowed()
        constraint.accept(ord("ab"[number * number % 7 % 2]) + 1)
        most = max(most, constraint._matcher._kept.total())
    assert 10_000 < most < 25_000
    del constraint
    gc.collect()
    assert places() <= before


def test_what_leads_back_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "KEPT_MAX", 20_000)
    constraint = Constraint("root ::= e\ne ::= e e | [a-z]", BYTES)

    def go_on() -> None:
        for _ in range(400):
            constraint.allowed()
            constraint.accept(ord("a") + 1)

    with pytest.raises(ResourceExhausted) as caught:
        go_on()
    assert caught.value.details == {"limit": 20_000}


def test_a_string_of_any_length_takes_one_place() -> None:
    """What may follow is found out once, and not for every character."""
    constraint = Constraint(JSON, BYTES)
    for byte in b'{"abc':
        constraint.accept(byte + 1)
    first = constraint.allowed()
    for byte in "dé \\u00e9\\n".encode():
        constraint.accept(byte + 1)
    assert constraint.allowed() is first


# --- tokens -------------------------------------------------------------------------------------

PIECES = ["a", "ab", "abc", "b", "bc", "c", "ca", "é", "éa", "日本", '"', "aaaaaaaa", "cba"]
WORDS = TokenTexts([b"", *(piece.encode() for piece in PIECES), b"\xc3", b"\xa9b", b"\xff"], [0])


def one_by_one(constraint: Constraint, count: int) -> list[int]:
    return [token for token in range(count) if constraint.allows(token)]


NODES = st.recursive(
    st.sampled_from(['"a"', '"b"', '"c"', "[ab]", "[^a]", '"é"', "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} | {pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} {pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)


def as_regular_expression(node: str) -> str:
    return node.replace(" ", "").replace('"', "").replace("[^a]", r"[^a\uffff]")


@given(NODES, st.lists(st.sampled_from("abcé"), max_size=6).map("".join))
def test_regular_grammars_agree_with_regular_expressions(node: str, text: str) -> None:
    whole = re.fullmatch(as_regular_expression(node), text, re.DOTALL) is not None
    assert (reads(f"root ::= {node}", text) in ("whole", "both")) == whole


@given(NODES, st.data())
def test_all_at_once_is_the_same_as_one_by_one(node: str, data: st.DataObject) -> None:
    constraint = Constraint(f"root ::= {node} root | {node}", WORDS)
    for _ in range(4):
        allowed = constraint.allowed().tolist()
        assert allowed == one_by_one(constraint, len(PIECES) + 4)
        tokens = [token for token in allowed if token]
        if not tokens:
            return
        constraint.accept(data.draw(st.sampled_from(tokens)))


def test_characters_in_pieces() -> None:
    """é is C3 A9; a token ends in the middle of it, and another begins there."""
    constraint = Constraint('root ::= "é" "b" | "日"', WORDS)
    half = len(PIECES) + 1
    assert constraint.allowed().tolist() == [PIECES.index("é") + 1, half]
    constraint.accept(half)
    assert not constraint.allows(0), "no end in the middle of a character"
    assert constraint.allowed().tolist() == [half + 1]
    constraint.accept(half + 1)
    assert constraint.finished
    assert constraint.allowed().tolist() == [0]
    assert reads("root ::= [^a]", "\u00e9"[:0]) == "more"
    nothing = Constraint("root ::= [\\uD800-\\uDFFF]", BYTES)
    assert nothing.allowed().tolist() == [], "no UTF-8 says half a surrogate pair"


def test_what_may_follow_is_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.worker.grammar.constraint.TOKENS_KEPT_MAX", 1000)
    constraint = Constraint("root ::= .{500}", BYTES)
    kept: list[int] = []
    for _ in range(100):
        first = constraint.allowed()
        assert constraint.allowed() is first
        kept.append(sum(len(p.tokens) for p in constraint._kept if p.tokens is not None))
        constraint.accept(ord("x") + 1)
    assert max(kept) <= 1000
    assert min(kept) > 0


def test_a_vocabulary_without_the_characters_is_a_dead_end() -> None:
    constraint = Constraint('root ::= "abX"', WORDS)
    constraint.accept(PIECES.index("ab") + 1)
    assert np.array_equal(constraint.allowed(), [])
    assert not constraint.finished
