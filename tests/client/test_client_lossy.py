"""Whatever a network does between a broker's stream and the client's core, every piece comes out
once and in order, and the end comes last."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client.core import ClientCore
from vram_conductor.client.effects import Effect, Failed, Finished, Output
from vram_conductor.client.session import MS, Timing
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.protocol.stream import SendStream
from vram_conductor.protocol.values import Usage

RID = bytes(16)
QUIET_MS = 1_000


class Network:
    """A broker's stream, a client's core, and what is on its way between them."""

    def __init__(self, pieces: int, window: int | None) -> None:
        self.now_ns = MS
        self.core = ClientCore("ipc:///x", "test", Timing(quiet_ms=QUIET_MS, cancel_ms=10**7))
        self.stream: SendStream | None = None
        self.pieces = pieces
        self.produced = 0
        self.down: deque[wire.BrokerMessage] = deque()
        self.effects: list[Effect] = []
        self.connect()
        decode = wire.Decode(rid=RID, agent="a", prompt="x", window=window)
        self.take(self.core.decode(decode, 10**7, self.now_ns))

    @property
    def text(self) -> list[int]:
        return [int(effect.text) for effect in self.effects if isinstance(effect, Output)]

    def take(self, effects: list[Effect]) -> None:
        self.effects += effects

    def connect(self) -> None:
        """Everything on its way is gone; HELLO and WELCOME arrive."""
        self.take(self.core.dial(self.now_ns))
        self.take(self.core.lost(self.now_ns))
        self.core.outgoing.clear()
        self.down.clear()
        welcome = wire.Welcome(
            v=(1, 0), session="s", broker_epoch=1, principal="p", heartbeat_ms=10**8
        )
        self.take(self.core.handle(welcome, self.now_ns))

    def broker_takes(self) -> None:
        while self.core.outgoing:
            message = self.core.outgoing.popleft()
            if isinstance(message, wire.Decode):
                if self.stream is None:
                    self.stream = SendStream(message.window)
                else:
                    self.stream.resume(0, message.window)
                self.down.append(wire.Accepted(rid=RID, job=1, position=0))
            elif self.stream is not None and isinstance(message, wire.Credit):
                self.stream.credit(message.upto)
            elif isinstance(message, wire.Resume):
                assert self.stream is not None, "RESUME of what was never accepted"
                try:
                    self.stream.resume(message.from_seq, message.window)
                except OutOfRange as error:
                    raise AssertionError("asked for what was never sent") from error

    def broker_gives(self, produce: int) -> None:
        if self.stream is None:
            return
        for _ in range(min(produce, self.pieces - self.produced)):
            self.stream.append(str(self.produced))
            self.produced += 1
        if self.produced == self.pieces:
            self.stream.finish()
        while pieces := self.stream.take():
            for piece in pieces:
                self.down.append(wire.Tokens(rid=RID, seq=piece.seq, text=piece.text))
        if self.stream.take_end():
            self.down.append(wire.Done(rid=RID, seq=self.pieces, usage=Usage()))

    def client_takes(self) -> None:
        while self.down:
            self.take(self.core.handle(self.down.popleft(), self.now_ns))

    def reader_wants(self, count: int) -> None:
        self.take(self.core.want(RID, count, self.now_ns))

    def pass_time(self) -> None:
        self.now_ns += (QUIET_MS + 1) * MS
        self.take(self.core.tick(self.now_ns))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(0, 5)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("receive"), st.just(0)),
        st.tuples(st.just("want"), st.integers(1, 5)),
        st.tuples(st.just("lose up"), st.integers(0, 3)),
        st.tuples(st.just("lose down"), st.integers(0, 3)),
        st.tuples(st.just("repeat down"), st.integers(0, 3)),
        st.tuples(st.just("swap down"), st.integers(0, 3)),
        st.tuples(st.just("reconnect"), st.just(0)),
        st.tuples(st.just("wait"), st.just(0)),
    ),
    max_size=60,
)


def step(net: Network, what: str, number: int) -> None:
    down, up = net.down, net.core.outgoing
    match what:
        case "produce":
            net.broker_gives(number)
        case "send":
            net.broker_takes()
        case "receive":
            net.client_takes()
        case "want":
            net.reader_wants(number)
        case "lose up" if number < len(up) and not isinstance(up[number], wire.Decode):
            del up[number]
        case "lose down" if number < len(down) and not isinstance(down[number], wire.Accepted):
            del down[number]
        case "repeat down" if number < len(down):
            down.append(down[number])
        case "swap down" if number + 1 < len(down):
            down[number], down[number + 1] = down[number + 1], down[number]
        case "reconnect":
            net.connect()
        case "wait":
            net.pass_time()
        case _:
            pass  # there is no such message


@given(STEPS, st.integers(0, 12), st.sampled_from([None, 1, 2, 7]))
def test_every_piece_once_in_order_and_then_the_end(
    steps: list[tuple[str, int]], pieces: int, window: int | None
) -> None:
    net = Network(pieces, window)
    for what, number in steps:
        step(net, what, number)
        assert net.text == list(range(len(net.text)))
    # From here on the network is good, and time heals what was lost.
    for _ in range(4 * pieces + 8):
        net.broker_takes()
        net.broker_gives(pieces)
        net.client_takes()
        net.reader_wants(3)
        net.pass_time()
    assert net.text == list(range(pieces))
    assert not any(isinstance(effect, Failed) for effect in net.effects)
    ends = [effect for effect in net.effects if isinstance(effect, Finished)]
    assert len(ends) == 1
    assert [effect for effect in net.effects if isinstance(effect, Output | Finished)][-1] is ends[
        0
    ]
