"""What a third agent notices while two others take turns without pause."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vram_conductor.client.bench_bed import TURN_S, Bed, open_bed, token_ids
from vram_conductor.client.bench_report import median, percentile
from vram_conductor.client.bench_sizes import register
from vram_conductor.client.bench_stream import Stream
from vram_conductor.client.bench_switch_scene import Switching
from vram_conductor.client.bench_turns import fill, short_turn, warm_up
from vram_conductor.protocol.errors import ConductorError

RATE_SHARE = 70.0
TOKEN_P95_MS = 12.0
FIRST_S = 60.0


class Busy:
    """A thread that does something again and again, until the block is left.

    Attributes:
        count: how often it did.
    """

    def __init__(self, act: Callable[[int], None]) -> None:
        self.count: int = 0
        self._act = act
        self._stop = threading.Event()
        self._error: ConductorError | None = None
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._act(self.count)
                self.count += 1
        except ConductorError as error:
            self._error = error

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(TURN_S)
        if self._error is not None:
            raise self._error


def stream_for(bed: Bed, agent: str, seconds: float, tokens_max: int) -> Stream:
    """A fresh conversation that streams for so long, or to its end.

    Raises:
        ConductorError: what the job failed with.
    """
    bed.conductor.reset(agent)
    stream = Stream(bed, agent, token_ids(32, seed=7), max_tokens=tokens_max)
    stream.wait_first(FIRST_S)
    stream.wait_over(seconds)
    stream.cancel()
    return stream.join(TURN_S)


def beside(switching: Switching) -> None:
    """A third model streams, alone and while the two others switch, several times."""
    setting, names = switching.setting, [switching.small.name, switching.large.name]
    third = switching.third.name
    capacity = switching.one.capacity([[third, name] for name in names])
    seconds = 2.5 if setting.on_cuda else 0.3
    alone: list[Stream] = []
    both: list[Stream] = []
    switches = 0
    with open_bed(setting, "timeshare", capacity) as bed:
        register(bed, switching.cast_one())
        for agent in ("a", "b"):
            fill(bed, agent, switching.tokens)
        warm_up(bed, ("a", "b"))
        tokens_max = switching.n_ctx - 256
        stream_for(bed, "c", 0.2, tokens_max)
        switching.say("a third agent beside two that switch without pause")
        for _ in range(setting.number(cuda=3, cpu=1)):
            alone.append(stream_for(bed, "c", seconds, tokens_max))
            with Busy(lambda index: _one_switch(bed, index)) as busy:
                both.append(stream_for(bed, "c", seconds, tokens_max))
            switches += busy.count
    _rows(switching, alone, both, switches)


def _one_switch(bed: Bed, index: int) -> None:
    short_turn(bed, "ab"[index % 2], index)


def _rows(switching: Switching, alone: list[Stream], both: list[Stream], switches: int) -> None:
    name = switching.third.name
    rate_alone = median([stream.tokens_per_s() for stream in alone])
    rate_both = median([stream.tokens_per_s() for stream in both])
    seconds = sum(stream.seconds() for stream in both)
    gaps = [gap for stream in both for gap in stream.token_gaps_ms()]
    pieces = [gap for stream in both for gap in stream.piece_gaps_ms()]
    switching.add(
        "third_rate",
        f"rate of {name} while two others switch without pause, over alone",
        100 * rate_both / rate_alone if rate_alone else None,
        "%",
        wanted=switching.wanted(RATE_SHARE),
        relation=">=",
        note=f"{rate_both:.0f} of {rate_alone:.0f} tokens/s, "
        f"{switches / seconds if seconds else 0:.1f} switches/s",
    )
    switching.add(
        "third_p95",
        f"p95 time per token of {name} meanwhile",
        percentile(gaps, 0.95) if gaps else None,
        "ms",
        wanted=switching.wanted(TOKEN_P95_MS),
        note=f"p95 between messages {percentile(pieces, 0.95):.1f} ms, longest {max(pieces):.0f} ms"
        if pieces
        else "",
    )
    switching.report.data["beside"] = {
        "alone_tokens_per_s": [stream.tokens_per_s() for stream in alone],
        "both_tokens_per_s": [stream.tokens_per_s() for stream in both],
        "piece_gaps_ms": [round(gap, 3) for gap in pieces],
        "switches": switches,
    }
