"""Where a text stands in a grammar. *Pure.*

Earley's recogniser (J. Earley, "An efficient context-free parsing algorithm", CACM 13, 1970) over
automata instead of rules' right-hand sides. Each place remembers where the rule that it is in was
called from, not how: so an ambiguous grammar costs no more than the square of the text's length,
where a list of all stacks grows exponentially. Equal places are one object, and what follows from
one is computed once: inside a string the same place comes back after every character.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.grammar.automaton import Automaton

ITEMS_MAX = 10_000
"""Of one place: ways to read the text so far."""

PLACES_MAX = 20_000
"""Places that are remembered; then all but the current one are forgotten."""

KEPT_MAX = 200_000
"""Items of all places that are remembered, or that these lead back to; about 40 MB, and what
Python's collector looks through now and then, while everything waits."""

WORK_MAX = 100_000
"""Steps that an answer may take at once: 0.03 to 0.1 s, in which all streams of its model wait."""

WORK_PER_TOKEN = 15_000
"""Steps that each token adds to what is left of WORK_MAX: 4 to 15 ms, so that no more are taken
on average. Five hundred optional properties take a tenth to a half of them."""

_STEP, _ITEM = 4, 2
"""What a step to another place, and an item of it, cost beside what they lead to."""

_ITEMS = "items"

_WHOLE = -1
"""The rule that a whole text completes."""

Item = tuple[int, int, "Place | None"]
"""State, the rule that is completed at its end, and where that was called (None: here)."""


class Place:
    """A set of items.

    Attributes:
        complete: the text may end here.
        finished: it must end here.
        next: what follows, by class; None: nothing.
        tokens: kept by whoever asks which tokens may follow.
    """

    __slots__ = (
        "__weakref__",
        "_ranges",
        "_single",
        "_waiting",
        "complete",
        "finished",
        "next",
        "tokens",
    )

    def __init__(
        self,
        scan: list[tuple[int, int, Item]],
        waiting: dict[int, list[Item]],
        *,
        complete: bool,
    ) -> None:
        # Words and lists of characters have one class at each edge: these are looked up.
        self._single: dict[int, list[Item]] = {}
        self._ranges: list[tuple[int, int, Item]] = []
        for edge in scan:
            if edge[0] == edge[1]:
                self._single.setdefault(edge[0], []).append(edge[2])
            else:
                self._ranges.append(edge)
        self._waiting = waiting
        self.complete, self.finished = complete, complete and not scan
        self.next: dict[int, Place | None] = {}
        self.tokens: Tokens | None = None

    def scanned(self, char_class: int) -> frozenset[Item]:
        """Items behind a character of this class."""
        found = list(self._single.get(char_class, ()))
        found += [item for first, last, item in self._ranges if first <= char_class <= last]
        return frozenset(
            (state, rule, self if origin is None else origin) for state, rule, origin in found
        )

    def edges(self, char_class: int) -> int:
        """Size of what :meth:`scanned` looks at."""
        return len(self._ranges) + len(self._single.get(char_class, ()))

    def callers(self, rule: int) -> list[Item]:
        """Items that go on when ``rule``, called here, is complete."""
        return [
            (state, outer, self if origin is None else origin)
            for state, outer, origin in self._waiting.get(rule, ())
        ]


class Matcher:
    """Makes places, for one grammar. One thread at a time.

    Attributes:
        start: before the first character.
    """

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._places: dict[tuple[bool, frozenset[Item]], Place] = {}
        self._behind: dict[frozenset[Item], Place] = {}
        self._left = WORK_MAX
        # Not of this object's own: what waits for a place's end must not keep it from ending.
        self._kept = Counter[str]()
        # Not "here": what was called here follows from the rest, and tells no places apart.
        before = Place([], {}, complete=False)
        self.start = self._close([(automaton.starts[automaton.root], _WHOLE, before)])

    def earn(self) -> None:
        """A token was said: what may be spent grows."""
        self._left = min(self._left + WORK_PER_TOKEN, WORK_MAX)

    def spend(self, steps: int) -> None:
        """Raises ResourceExhausted ``grammar_too_ambiguous``: so many are not left."""
        self._left -= steps
        if self._left < 0:
            raise _too_ambiguous(
                f"steps to find out what may come next (and {WORK_PER_TOKEN} more for each token)",
                WORK_MAX,
            )

    def forget(self, current: Place) -> None:
        """Keep what is remembered within PLACES_MAX and KEPT_MAX. Not in the middle of anything.

        Raises:
            ResourceExhausted: ``grammar_too_ambiguous``: ``current`` alone leads back to more.
        """
        if len(self._places) <= PLACES_MAX and self._kept[_ITEMS] <= KEPT_MAX:
            return
        for place in self._places.values():
            place.next.clear()
            place.tokens = None
        self._places.clear()
        self._behind.clear()
        current.next.clear()
        if self._kept[_ITEMS] > KEPT_MAX:
            raise _too_ambiguous("places and ways by which they were reached", KEPT_MAX)

    def step(self, place: Place, char_class: int) -> Place | None:
        """The place behind one more character; None: it may not follow.

        Raises:
            ResourceExhausted: ``grammar_too_ambiguous``: more than ITEMS_MAX items, or more
                steps than are left.
        """
        if char_class in place.next:
            return place.next[char_class]
        self.spend(_STEP + place.edges(char_class))
        scanned = place.scanned(char_class)
        found = self._behind.get(scanned)
        if scanned and found is None:
            # Characters that are told apart elsewhere lead to the same from here, as digits do.
            found = self._behind[scanned] = self._close(scanned)
        place.next[char_class] = found
        return found

    def _close(self, kernel: Collection[Item]) -> Place:
        """The place of these items and of all that follow from them without a character."""
        automaton = self._automaton
        todo, seen = list(kernel), set(kernel)
        scan: list[tuple[int, int, Item]] = []
        waiting: dict[int, list[Item]] = {}
        complete = False
        while todo:
            state, rule, origin = todo.pop()
            found: list[Item] = [(target, rule, origin) for target in automaton.jumps[state]]
            if automaton.ends[state]:
                if rule == _WHOLE:
                    complete = True
                elif origin is not None:
                    found += origin.callers(rule)
                # Else the rule was called here and is empty: its caller went past it already.
            for called, target in automaton.calls[state]:
                begin = automaton.starts[called]
                if automaton.nullable[called]:
                    found.append((target, rule, origin))
                if automaton.ends[target]:
                    # Its end is the end of the rule that it is in: nothing to come back to.
                    found.append((begin, rule, origin))
                else:
                    waiting.setdefault(called, []).append((target, rule, origin))
                    found.append((begin, called, None))
            for first, last, target in automaton.edges[state]:
                scan.append((first, last, (target, rule, origin)))
            # Not what is new among them: to find that an item is known takes its time, too.
            self.spend(_ITEM + len(found))
            for item in found:
                if item not in seen:
                    seen.add(item)
                    todo.append(item)
            if len(seen) > ITEMS_MAX:
                raise _too_ambiguous("ways to read what was said so far", ITEMS_MAX)
        self.spend(len(scan))
        return self._same(Place(scan, waiting, complete=complete), seen)

    def _same(self, place: Place, items: set[Item]) -> Place:
        """The place that has been made before of the same items, if there is one."""
        automaton = self._automaton
        key = frozenset(
            item
            for item in items
            if item[2] is not None and (automaton.edges[item[0]] or automaton.calls[item[0]])
        )
        same = self._places.setdefault((place.complete, key), place)
        if same is place:
            self._kept[_ITEMS] += len(items)
            end = weakref.finalize(place, self._kept.subtract, {_ITEMS: len(items)})
            end.atexit = False
        return same


def _too_ambiguous(what: str, limit: int) -> ResourceExhausted:
    return ResourceExhausted(
        "grammar_too_ambiguous",
        f"the grammar leaves more than {limit} {what}; make it less ambiguous (alternatives that "
        "begin alike, repetitions of what may be empty)",
        limit=limit,
    )
