"""Times of one long reply: when each piece came and how many tokens it had."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from vram_conductor.client.bench_bed import Bed
from vram_conductor.client.bench_report import median, percentile
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import Usage


class Stream:
    """A reply that is read in a thread of its own.

    Attributes:
        at_s: when each piece came, on ``time.perf_counter``'s clock.
        counts: how many tokens had come with it, all told.
        began_s: when the job was sent.
        usage: the receipt, at the end.
    """

    def __init__(self, bed: Bed, agent: str, tokens: Sequence[int], **options: Any) -> None:
        self.agent = agent
        self.at_s: list[float] = []
        self.counts: list[int] = []
        self.usage: Usage | None = None
        self.error: ConductorError | None = None
        self.began_s: float = time.perf_counter()
        self._first = threading.Event()
        self._reply = bed.start(agent, tokens, **options)
        self._thread = threading.Thread(target=self._read, name=f"stream {agent}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self._reply:
                self.at_s.append(time.perf_counter())
                self.counts.append(len(self._reply.ids))
                self._first.set()
            self.usage = self._reply.usage
        except ConductorError as error:
            self.error = error
        finally:
            self._first.set()

    def wait_first(self, timeout_s: float) -> bool:
        """Wait for the first piece; whether it came."""
        return self._first.wait(timeout_s) and bool(self.at_s)

    def wait_over(self, timeout_s: float) -> None:
        """Wait for its end, or for so long."""
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """End it within a step."""
        self._reply.cancel()

    def join(self, timeout_s: float) -> Stream:
        """Wait for its end.

        Raises:
            ConductorError: what the job failed with.
        """
        self._thread.join(timeout_s)
        if self.error is not None:
            raise self.error
        return self

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return self.counts[-1] if self.counts else 0

    def seconds(self) -> float:
        """From the first piece to the last."""
        return self.at_s[-1] - self.at_s[0] if len(self.at_s) > 1 else 0.0

    def tokens_per_s(self, from_s: float = 0.0, to_s: float = float("inf")) -> float:
        """Rate between the first and the last piece within a window; 0 if there are not two."""
        inside = [at for at, when in enumerate(self.at_s) if from_s <= when <= to_s]
        if len(inside) < 2:
            return 0.0
        first, last = inside[0], inside[-1]
        took_s = self.at_s[last] - self.at_s[first]
        return (self.counts[last] - self.counts[first]) / took_s if took_s > 0 else 0.0

    def piece_gaps_ms(self, from_s: float = 0.0, to_s: float = float("inf")) -> list[float]:
        """Between a piece and the next."""
        inside = [when for when in self.at_s if from_s <= when <= to_s]
        return [1000 * (b - a) for a, b in itertools.pairwise(inside)]

    def token_gaps_ms(self, from_s: float = 0.0, to_s: float = float("inf")) -> list[float]:
        """Between a token and the next. Several may share a piece; whatever that piece was late
        is then put on one of them, and the others get the usual time: never less than the
        truth in the tail."""
        pairs = [
            (1000 * (self.at_s[at] - self.at_s[at - 1]), self.counts[at] - self.counts[at - 1])
            for at in range(1, len(self.at_s))
            if from_s <= self.at_s[at - 1] and self.at_s[at] <= to_s
        ]
        pairs = [(gap, count) for gap, count in pairs if count > 0]
        if not pairs:
            return []
        usual = median([gap / count for gap, count in pairs])
        found: list[float] = []
        for gap, count in pairs:
            each = min(usual, gap / count)
            found += [each] * (count - 1) + [gap - each * (count - 1)]
        return found

    def p95_ms(self, from_s: float = 0.0, to_s: float = float("inf")) -> float:
        """95th percentile of :meth:`token_gaps_ms`; 0 if nothing came."""
        gaps = self.token_gaps_ms(from_s, to_s)
        return percentile(gaps, 0.95) if gaps else 0.0
