"""Streams: numbering, credit, retention, resume; exactly once under any accident."""

import random
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.protocol.stream import (
    CreditDue,
    Piece,
    ReceiveStream,
    ResumeDue,
    SendStream,
)
from vram_conductor.protocol.stream_receive import AHEAD_PIECES_MAX

MS = 1_000_000


def filled(count: int, window: int | None = None) -> SendStream:
    stream = SendStream(window)
    for number in range(count):
        assert stream.append(f"{number} ", (number,))
    return stream


def seqs(pieces: list[Piece]) -> list[int]:
    return [piece.seq for piece in pieces]


# --- sender ---


def test_pieces_are_numbered_and_never_merged() -> None:
    stream = filled(3)
    assert stream.take() == [Piece(0, "0 ", (0,)), Piece(1, "1 ", (1,)), Piece(2, "2 ", (2,))]
    assert stream.take() == []
    assert stream.produced == 3


def test_credit_is_absolute_and_cumulative() -> None:
    stream = filled(10, window=2)
    assert seqs(stream.take()) == [0, 1]
    stream.credit(5)
    stream.credit(5)
    assert seqs(stream.take()) == [2, 3, 4]
    stream.credit(3)
    assert stream.take() == []
    stream.credit(10**9)
    assert seqs(stream.take()) == [5, 6, 7, 8, 9]


def test_a_late_smaller_credit_takes_nothing_back() -> None:
    stream = filled(10, window=2)
    stream.credit(8)
    stream.credit(3)
    assert len(stream.take()) == 8


def test_nothing_is_given_out_while_nobody_is_attached() -> None:
    stream = filled(2)
    stream.detach()
    assert stream.take() == []
    assert stream.released == 0
    stream.resume(0)
    assert seqs(stream.take()) == [0, 1]


def test_no_window_means_unlimited_and_credit_does_not_limit_it() -> None:
    stream = filled(100)
    stream.credit(1)
    assert len(stream.take(1000)) == 100


def test_take_is_bounded_so_that_others_get_their_turn() -> None:
    stream = filled(100, window=10)
    assert seqs(stream.take(3)) == [0, 1, 2]
    assert seqs(stream.take(2)) == [3, 4]
    assert stream.sendable == 5
    stream.detach()
    assert stream.sendable == 0


def test_released_tells_whether_a_retry_is_still_allowed() -> None:
    stream = filled(2, window=0)
    assert stream.released == 0
    assert stream.restart()
    assert (stream.produced, stream.kept_bytes) == (0, 0)
    stream.append("new")
    stream.credit(9)
    stream.take()
    assert stream.released == 1
    stream.resume(0)
    assert stream.released == 1, "what got out once cannot be taken back"
    assert not stream.restart()


def test_the_end_waits_for_the_last_piece_but_not_for_credit() -> None:
    stream = filled(2, window=1)
    stream.finish()
    stream.take()
    assert not stream.take_end()
    stream.credit(2)
    stream.take()
    assert stream.take_end()
    assert not stream.take_end()


def test_resume_repeats_from_any_piece_and_the_end_too() -> None:
    stream = filled(5)
    stream.take()
    stream.finish()
    assert stream.take_end()
    stream.detach()
    assert stream.take() == []
    assert not stream.take_end()
    stream.resume(3)
    assert seqs(stream.take()) == [3, 4]
    assert stream.take_end()
    stream.resume(0, window=2)
    assert seqs(stream.take()) == [0, 1]
    stream.credit(5)
    assert seqs(stream.take()) == [2, 3, 4]


def test_resume_beyond_what_was_sent_changes_nothing() -> None:
    stream = filled(5, window=3)
    stream.take()
    stream.detach()
    for from_seq in (4, -1):
        with pytest.raises(OutOfRange) as caught:
            stream.resume(from_seq)
        assert caught.value.reason == "resume_out_of_range"
        assert caught.value.details["last_seq"] == 3
    assert not stream.attached


def test_kept_bytes_are_bounded() -> None:
    stream = SendStream(None, bytes_max=1000)
    fits = 0
    while stream.append("x" * 36, (1, 2)):
        fits += 1
    assert fits == 1000 // (64 + 36 + 16)
    assert stream.kept_bytes == fits * (64 + 36 + 16) <= 1000
    assert stream.append("x"), "a smaller one still fits"


def test_multibyte_text_is_charged_by_its_bytes() -> None:
    stream = SendStream(None, bytes_max=100)
    assert not stream.append("😀" * 10)
    assert stream.append("😀" * 9)


# --- receiver ---


def test_duplicates_and_reordering_are_invisible() -> None:
    stream = ReceiveStream()
    assert not stream.offer(1, "b")
    assert not stream.offer(1, "b")
    assert stream.take() is None
    assert stream.offer(0, "a")
    assert not stream.offer(0, "a")
    assert [piece.text for piece in iter(stream.take, None)] == ["a", "b"]
    assert not stream.offer(0, "a")
    assert stream.take() is None
    assert stream.resume_due() is None, "a duplicate is no gap"
    stream.end(2)
    assert stream.complete


def test_complete_only_when_all_was_taken() -> None:
    stream = ReceiveStream()
    stream.end(1)
    assert not stream.complete
    assert stream.offer(0, "a")
    assert not stream.complete
    stream.take()
    assert stream.complete


def test_an_end_without_seq_ends_with_what_has_come() -> None:
    stream = ReceiveStream()
    stream.offer(0, "a")
    stream.end(None)
    assert not stream.complete
    stream.take()
    assert stream.complete
    assert stream.resume_due() is None


def test_what_comes_after_the_end_is_ignored() -> None:
    stream = ReceiveStream()
    stream.end(1)
    assert not stream.offer(1, "x")
    stream.end(5)
    stream.offer(0, "a")
    stream.take()
    assert stream.complete


def test_credit_follows_what_the_application_took() -> None:
    stream = ReceiveStream(window=4)
    assert stream.initial_window == 4
    for seq in range(4):
        stream.offer(seq, "x")
    assert stream.credit_due() is None, "unread pieces are no reason for more"
    stream.take()
    assert stream.credit_due() is None
    stream.take()
    assert stream.credit_due() == CreditDue(ack=4, upto=6)
    assert stream.credit_due() is None


def test_a_window_of_one_still_moves() -> None:
    sender, receiver = filled(5, window=1), ReceiveStream(window=1)
    got: list[int] = []
    for _ in range(20):
        for piece in sender.take():
            receiver.offer(piece.seq, piece.text)
        while (taken := receiver.take()) is not None:
            got.append(taken.seq)
        if due := receiver.credit_due():
            sender.credit(due.upto)
    assert got == [0, 1, 2, 3, 4]


def test_a_gap_asks_for_resume_once_until_there_is_progress() -> None:
    stream = ReceiveStream()
    stream.offer(0, "a")
    assert stream.resume_due() is None
    stream.offer(2, "c")
    assert stream.resume_due() == ResumeDue(from_seq=1, window=None)
    assert stream.resume_due() is None
    stream.offer(1, "b")
    assert stream.resume_due() is None
    stream.end(5)
    assert stream.resume_due() == ResumeDue(from_seq=3, window=None)


def test_a_flood_of_future_pieces_is_bounded() -> None:
    stream = ReceiveStream()
    assert not stream.offer(AHEAD_PIECES_MAX + 1, "x")
    assert stream.resume_due() is None
    assert not stream.offer(AHEAD_PIECES_MAX, "x")
    assert stream.resume_due() is not None


# --- both, over a bad network ---


class Network:
    """One job from broker to client with everything that can go wrong on the way."""

    def __init__(self, seed: int, texts: list[str], window: int | None) -> None:
        self.dice = random.Random(seed)
        self.todo = deque(texts)
        self.sender = SendStream(window)
        self.receiver = ReceiveStream(window)
        self.down: deque[Piece | int] = deque()
        self.up: deque[CreditDue | ResumeDue] = deque()
        self.got: list[Piece] = []
        self.unread_max = 0

    def step(self, *, faults: bool) -> None:
        actions = [self.produce, self.send, self.deliver, self.deliver, self.answer, self.read]
        if faults:
            actions.append(self.fault)
        self.dice.choice(actions)()
        if due := self.receiver.resume_due():
            self.up.append(due)

    def produce(self) -> None:
        if self.todo:
            assert self.sender.append(self.todo.popleft())
        else:
            self.sender.finish()

    def send(self) -> None:
        taken = self.sender.take(self.dice.randint(1, 5))
        self.down.extend(taken)
        if self.sender.take_end():
            self.down.append(self.sender.produced)

    def deliver(self) -> None:
        if not self.down:
            return
        what = self.down.popleft()
        if isinstance(what, Piece):
            self.receiver.offer(what.seq, what.text)
        else:
            self.receiver.end(what)

    def answer(self) -> None:
        if not self.up:
            return
        due = self.up.popleft()
        if isinstance(due, CreditDue):
            self.sender.credit(due.upto)
        else:
            self.sender.resume(due.from_seq, due.window)

    def read(self) -> None:
        self.unread_max = max(self.unread_max, self.receiver.received - self.receiver.taken)
        if (piece := self.receiver.take()) is not None:
            self.got.append(piece)
        if due := self.receiver.credit_due():
            self.up.append(due)

    def fault(self) -> None:
        kind = self.dice.choice(("drop", "duplicate", "shuffle", "stale credit", "reconnect"))
        if kind == "drop" and self.down:
            del self.down[self.dice.randrange(len(self.down))]
        elif kind == "duplicate" and self.down:
            self.down.append(self.dice.choice(self.down))
        elif kind == "shuffle":
            pieces = list(self.down)
            self.dice.shuffle(pieces)
            self.down = deque(pieces)
        elif kind == "stale credit":
            self.up.append(CreditDue(0, 0))
        elif kind == "reconnect":
            self.reconnect()

    def reconnect(self) -> None:
        self.down.clear()
        self.up.clear()
        self.sender.detach()
        self.up.append(self.receiver.resume())

    def run(self) -> None:
        for _ in range(40 * (len(self.todo) + 1)):
            self.step(faults=True)
        # From here on the network is good; one reconnect repairs whatever is still missing.
        self.reconnect()
        for _ in range(200 * (len(self.todo) + len(self.got) + 40)):
            if self.receiver.complete:
                return
            self.step(faults=False)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    texts=st.lists(st.text(max_size=3), max_size=30),
    window=st.none() | st.integers(1, 8),
)
@example(seed=0, texts=[], window=None)
def test_every_character_arrives_exactly_once(
    seed: int, texts: list[str], window: int | None
) -> None:
    network = Network(seed, texts, window)
    network.run()
    assert network.receiver.complete
    assert "".join(piece.text for piece in network.got) == "".join(texts)
    assert [piece.seq for piece in network.got] == list(range(len(texts)))
    if window is not None:
        assert network.unread_max <= window, "the client's memory is bounded by its window"
