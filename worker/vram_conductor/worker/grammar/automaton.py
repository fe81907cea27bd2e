"""A grammar as one automaton per rule, which call each other. *Pure.*

Repetition is a loop within a rule's automaton, so it costs no stack. All characters that no rule
tells apart are one class, so what follows from one is known for all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from vram_conductor.worker.grammar.rules import (
    Chars,
    Node,
    Ref,
    Repeat,
    Series,
    bad_grammar,
    too_complex,
)

STATES_MAX = 100_000
"""States of all rules together, counted repetitions written out."""

_WORK_MAX = 2 * STATES_MAX
"""What is empty takes no state, however often it is repeated."""

_SKIPPED_MAX = 64


class Automaton:
    """States are numbered through all rules.

    Attributes:
        edges: by state: (first class, last class, next state).
        jumps: by state: states that are reached without a character.
        calls: by state: (rule, state after it).
        starts: by rule. ``ends``: by state, whether a rule ends there.
        nullable: by rule, whether it can be empty.
        root: the rule that it begins with.
    """

    def __init__(self, rules: Mapping[str, Node]) -> None:
        """Raises InvalidArgument ``bad_grammar`` (nothing can be said), OutOfRange
        ``grammar_too_complex``."""
        self._work = 0
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._ranges: list[list[tuple[int, int, int]]] = []
        self.jumps: list[list[int]] = []
        self.calls: list[list[tuple[int, int]]] = []
        self.ends: list[bool] = []
        self.starts: list[int] = []
        self._finals: list[int] = []
        self.root = self._numbers["root"]
        for body in rules.values():
            start = self._state()
            final = self._compile(body, start)
            last = self._state()
            self.jumps[final].append(last)
            self.ends[last] = True
            self.starts.append(start)
            self._finals.append(last)
        edges = [edge for state in self._ranges for edge in state]
        self.boundaries = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        states = [self._skip(state) for state in range(len(self.jumps))]
        self.edges = [
            [(self.class_of(low), self.class_of(high), states[to]) for low, high, to in ranges]
            for ranges in self._ranges
        ]
        self.jumps = [list(dict.fromkeys(states[each] for each in jump)) for jump in self.jumps]
        self.calls = [[(rule, states[target]) for rule, target in call] for call in self.calls]
        self.starts = [states[start] for start in self.starts]
        self.nullable = self._passable(with_chars=False)
        if not self._passable(with_chars=True)[self.root]:
            raise bad_grammar("the rule root never comes to an end, whatever is said")

    def class_of(self, char: int) -> int:
        """The class of a code point."""
        return bisect_right(self.boundaries, char)

    def _state(self) -> int:
        if len(self.jumps) == STATES_MAX:
            raise _too_many()
        self._ranges.append([])
        self.jumps.append([])
        self.calls.append([])
        self.ends.append(False)
        return len(self.jumps) - 1

    def _compile(self, node: Node, state: int) -> int:
        """Add ``node`` behind ``state``; the state behind it."""
        self._work += 1
        if self._work > _WORK_MAX:
            raise _too_many()
        if isinstance(node, Series):
            for item in node.items:
                state = self._compile(item, state)
            return state
        if isinstance(node, Repeat):
            return self._repeat(node, state)
        after = self._state()
        if isinstance(node, Chars):
            self._ranges[state] += [(low, high, after) for low, high in node.ranges]
        elif isinstance(node, Ref):
            self.calls[state].append((self._numbers[node.name], after))
        else:
            for option in node.options:
                begin = self._state()
                self.jumps[state].append(begin)
                self.jumps[self._compile(option, begin)].append(after)
        return after

    def _repeat(self, node: Repeat, state: int) -> int:
        for _ in range(node.least):
            state = self._compile(node.item, state)
        after = self._state()
        self.jumps[state].append(after)
        if node.most is None:
            self.jumps[self._compile(node.item, after)].append(after)
            return after
        for _ in range(node.most - node.least):
            begin = self._state()
            self.jumps[state].append(begin)
            state = self._compile(node.item, begin)
            self.jumps[state].append(after)
        return after

    def _skip(self, state: int) -> int:
        """The first state behind this one, or itself, where there is more than to go on."""
        for _ in range(_SKIPPED_MAX):
            jumps = self.jumps[state]
            if self.ends[state] or self._ranges[state] or self.calls[state] or len(jumps) != 1:
                return state
            state = jumps[0]
        return state

    def _passable(self, *, with_chars: bool) -> list[bool]:
        """Which rules can be passed through: without a character, or with any."""
        passable = [False] * len(self.starts)
        rule_of_final = {final: rule for rule, final in enumerate(self._finals)}
        waiting: dict[int, list[int]] = {}
        reached = set(self.starts)
        todo = list(self.starts)
        while todo:
            state = todo.pop()
            found = list(self.jumps[state])
            if with_chars:
                found += [target for _, _, target in self.edges[state]]
            for rule, target in self.calls[state]:
                if passable[rule]:
                    found.append(target)
                else:
                    waiting.setdefault(rule, []).append(target)
            ended = rule_of_final.get(state)
            if ended is not None and not passable[ended]:
                passable[ended] = True
                found += waiting.pop(ended, [])
            for target in found:
                if target not in reached:
                    reached.add(target)
                    todo.append(target)
        return passable


def _too_many() -> Exception:
    return too_complex(
        f"with its repetitions written out it has more than {STATES_MAX} elements",
        limit=STATES_MAX,
    )
