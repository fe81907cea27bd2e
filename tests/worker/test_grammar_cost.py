"""What a grammar may cost: much at once, little on average, whatever it says."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import pytest

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.grammar import matcher
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.grammar.tokens import TokenTexts

if TYPE_CHECKING:
    from vram_conductor.worker.engine import Tokens

LETTERS = 'abmz 0123456789",:{}p!'
PIECES = ["".join(each) for n in (1, 2, 3) for each in product(LETTERS, repeat=n)]
WORDS = TokenTexts([b"", *(piece.encode() for piece in PIECES)], [0])
"""Every text of up to three of these letters, and an end."""

ONCE_S, PER_TOKEN_S = 2.0, 0.04
"""CPU time; several times what is taken here, for slow and busy machines."""

HOSTILE = {
    "a window that grows": 'root ::= [a-z ]* [a-m] [a-z ]{3000} "!"',
    "sums of sums": "root ::= e\ne ::= e e | [a-z ]",
    "sums of three": "root ::= e\ne ::= e e e | e e | [a-z ]",
    "gaps": "root ::= [a-z ]* " + " ".join(f'[{c}-z]{{0,300}} "q"?' for c in "abcdefghij" * 2),
    "ways back": "root ::= x\nx ::= "
    + " | ".join(f'"a"? "a"{{0,9}} x "{chr(98 + n % 20)}{n}"' for n in range(700))
    + " | [a-z]",
}


def spent(constraint: Constraint) -> int:
    """Steps that are not left."""
    return matcher.WORK_MAX - constraint._matcher._left


def goes_on(tokens: Tokens, chance: random.Random) -> int:
    """One of those that end nothing; 0: there is none."""
    some = tokens[tokens > 0]
    return int(some[chance.randrange(len(some))]) if len(some) else 0


@pytest.fixture
def small_heap() -> Iterator[None]:
    """What other tests have left is nothing that the collector should go through here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_costs_little_or_is_refused(name: str) -> None:
    constraint, chance = Constraint(HOSTILE[name], WORDS), random.Random(3)
    said, all_s, most_s, refusal = 0, 0.0, 0.0, None
    while said < 300 and refusal is None:
        began = time.thread_time()
        try:
            constraint.accept(goes_on(constraint.allowed(), chance))
        except ResourceExhausted as error:
            refusal = error
        one_s = time.thread_time() - began
        said, all_s, most_s = said + 1, all_s + one_s, max(most_s, one_s)
    assert most_s < ONCE_S
    assert all_s < ONCE_S + said * PER_TOKEN_S, said
    assert refusal is None or refusal.reason == "grammar_too_ambiguous"
    assert refusal is not None or name == "gaps"


def tokens_said(work_max: int, per_token: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How far one hostile answer comes with so many steps."""
    monkeypatch.setattr(matcher, "WORK_MAX", work_max)
    monkeypatch.setattr(matcher, "WORK_PER_TOKEN", per_token)
    constraint = Constraint(HOSTILE["sums of sums"], WORDS)
    said = 0
    with pytest.raises(ResourceExhausted) as caught:  # noqa: PT012
        while said < 400:
            constraint.accept(int(constraint.allowed()[1]))
            said += 1
            assert 0 <= spent(constraint) <= work_max
    assert caught.value.details == {"limit": work_max}
    return said


def test_each_token_adds_to_what_an_answer_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = tokens_said(60_000, 0, monkeypatch)
    assert 0 < at_once < tokens_said(60_000, 10_000, monkeypatch)
    assert at_once < tokens_said(120_000, 0, monkeypatch)


def test_what_is_saved_is_no_more_than_an_answer_begins_with() -> None:
    constraint = Constraint("root ::= [a-z]+", WORDS)
    for _ in range(50):
        constraint.accept(1)
    assert spent(constraint) == 0
    constraint.allowed()
    before = spent(constraint)
    constraint.allows(5)
    constraint.among(constraint.allowed())
    assert spent(constraint) == before, "what is known costs nothing"


def test_characters_that_other_rules_tell_apart_cost_once() -> None:
    """After each digit of a number the whole rest of the grammar may follow."""
    rest = "".join(f'r{n} ::= ("," "n{n}")? r{n + 1}\n' for n in range(300)) + 'r300 ::= "!"\n'
    plain = f"root ::= [0-9]+ r0 | w\n{rest}w ::= "
    together = Constraint(plain + '"x"', WORDS)
    apart = Constraint(plain + " | ".join(f'"x{digit}"' for digit in range(10)), WORDS)
    costs: list[int] = []
    for constraint in (together, apart):
        constraint.accept(PIECES.index("1") + 1)
        before = spent(constraint)
        constraint.allowed()
        costs.append(spent(constraint) - before)
    assert costs[1] < 2 * costs[0], costs


def test_a_long_list_of_characters_is_looked_up() -> None:
    """Each of them is a class of its own; to go through all for each would be their square."""
    letters = "".join(chr(0x4E00 + 2 * number) for number in range(2000))
    texts = TokenTexts([b"", *(letter.encode() for letter in letters)], [0])
    constraint = Constraint(f"root ::= [{letters}]*", texts)
    assert len(constraint.allowed()) == len(letters) + 1
    assert spent(constraint) < 20 * len(letters)
