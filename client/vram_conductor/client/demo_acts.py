"""The acts of the demo, in order; each checks what it claims."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from vram_conductor.client.board import render
from vram_conductor.client.demo_models import DemoModel
from vram_conductor.client.demo_outside import PeakMemory, flip_bytes, kill
from vram_conductor.client.demo_script import (
    CODER,
    N_CTX,
    TERMS,
    WRITER,
    Script,
    Turn,
    names,
)
from vram_conductor.client.output import Output
from vram_conductor.client.receipts import MARGIN, Receipts
from vram_conductor.client.reply import Result
from vram_conductor.client.stage import Stage
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size
from vram_conductor.protocol.errors import ConductorError, LedgerDeny
from vram_conductor.protocol.status import DeviceStatus, StatusReport

REFERENCE = "never-swapped"
WORKER_S = 30.0


class Acts:
    """All of them share one stage, one connection and one list of receipts.

    Args:
        cast: the agents, each with its model.
        giant: a model, and a context with which it does not fit.
        budget: bytes of the device.
    """

    def __init__(
        self,
        stage: Stage,
        conductor: Conductor,
        receipts: Receipts,
        cast: Sequence[tuple[str, DemoModel]],
        giant: tuple[DemoModel, int],
        budget: int,
    ) -> None:
        self._stage = stage
        self._conductor = conductor
        self._receipts = receipts
        self._cast = cast
        self._giant = giant
        self._weights = {model.name: model.weights_bytes for _, model in cast}
        self._budget = budget
        self._script = Script(conductor, receipts)
        self._turns: dict[str, list[Result]] = {}

    def run(self, separate_bytes: int, output: Output) -> None:
        """All acts; one that cannot be finished is a claim that does not hold, and the last."""
        memory = PeakMemory(self._worker_pid())
        acts: list[tuple[str, Callable[[], None]]] = [
            ("admission", lambda: self._admit(output)),
            ("refusal", self._refuse),
            ("turns", self._take_turns),
            ("memory", lambda: self._memory(memory, separate_bytes)),
            ("comparison", self._compare),
            ("kill -9", self._kill),
            ("corruption", self._corrupt),
        ]
        for name, act in acts:
            try:
                act()
            except ConductorError as error:
                self._receipts.end_line()
                self._receipts.check(f"{name} can be shown", False, error.info.message)
                return

    # --- acts ---------------------------------------------------------------------------------

    def _admit(self, output: Output) -> None:
        self._receipts.heading("with it: admission before anything is loaded")
        for agent, model in self._cast:
            began = time.monotonic()
            with output.waiting(f"admitting {agent}"):
                info = self._conductor.register(agent, model.name, n_ctx=N_CTX, temperature=0).info
            assert info is not None
            took = duration(1000 * (time.monotonic() - began))
            shared = f", weights shared with {names(info.shared_with)}" if info.shared_with else ""
            self._receipts.say(f"{agent} admitted in {took}{shared}")
        report = self._report_of_all()
        self._receipts.say(render(report, output.width - len(MARGIN)))
        device = report.devices[0]
        weights = [line for line in device.resident if line.key.startswith("weights:")]
        self._receipts.check(
            "one copy of the weights per model",
            len(weights) == len(self._weights),
            f"{len(weights)} copies for 3 agents, {size(sum(line.bytes for line in weights))}",
        )
        over = self._estimates_over(device)
        self._receipts.check(
            "no estimate is below what was allocated",
            0 <= over <= self._budget // 100,
            f"{over} bytes above, of {size(device.resident_bytes)}",
        )
        self._receipts.check(
            "promised and resident fit, line by line",
            max(device.promised.promised_bytes, device.resident_bytes) <= self._budget
            and self._agree(device),
            f"{size(device.promised.promised_bytes)} promised, {size(device.resident_bytes)} "
            f"resident, of {size(self._budget)}",
        )

    def _refuse(self) -> None:
        model, n_ctx = self._giant[0].name, self._giant[1]
        self._receipts.heading(f"an agent that is too big: n_ctx {n_ctx}")
        before = self._allocations()
        began = time.monotonic()
        try:
            self._conductor.register("giant", model, n_ctx=n_ctx)
        except LedgerDeny as error:
            took = 1000 * (time.monotonic() - began)
            self._receipts.say(error.info.message)
            hint = error.largest_n_ctx
        else:
            self._receipts.check("refused before anything was loaded", False, "it was admitted")
            return
        self._receipts.check(
            "refused before anything was loaded",
            self._allocations() == before,
            f"after {duration(took)}, allocations unchanged",
        )
        self._conductor.register("giant", model, n_ctx=hint)
        over = hint + 256
        try:
            self._conductor.register("giant-2", model, n_ctx=over)
            more = "admitted"
        except LedgerDeny:
            more = "refused"
        self._receipts.check(
            "the hinted n_ctx fits, and is the largest",
            hint > 0 and more == "refused",
            f"{hint} admitted, {over} {more}",
        )
        self._conductor.unregister("giant")
        self._receipts.check(
            "unregistering restores the ledger",
            self._promised() == before[0],
            f"{size(self._device().promised.promised_bytes)} promised, as before",
        )

    def _take_turns(self) -> None:
        self._receipts.heading("turns: coder, writer, coder, writer, coder")
        self._receipts.say(TERMS)
        results: dict[str, list[Result]] = {CODER: [], WRITER: []}
        for turn in self._script.turns():
            results[turn.agent].append(self._script.play(turn))
        self._turns = results
        usage = results[CODER][1].usage
        self._receipts.check(
            "kv_swap_evicted", bool(usage.swap.evicted), names(usage.swap.evicted) or "nobody"
        )
        self._receipts.check(
            "kv_swap_restored",
            usage.swap.restored and usage.reused_tokens > 0 and not usage.reprefilled_tokens,
            f"{usage.reused_tokens} of {usage.prompt_tokens} tokens re-used, "
            f"{size(usage.swap.bytes)} in {duration(usage.swap.ms)}",
        )
        cold = self._script.cold(results[CODER])
        resumed, computed = usage.swap.ms + usage.prefill_ms, cold.usage.prefill_ms
        self._receipts.check(
            "resuming beats computing it again",
            resumed < computed,
            f"{duration(resumed)} against {duration(computed)} for {cold.usage.prompt_tokens} "
            f"tokens ({computed / max(resumed, 0.1):.0f} x)",
        )

    def _memory(self, memory: PeakMemory, separate_bytes: int) -> None:
        peak = memory.stop() - memory.first_bytes
        figures = (
            f"{size(peak)} above idle, against {size(separate_bytes)}; it includes vocabularies "
            "and libraries, which the ledger of a cpu does not count"
        )
        if len(self._weights) < len(self._cast):
            name = "peak memory of the worker, from outside"
            self._receipts.check(name, peak < separate_bytes, figures)
        else:
            # Nobody shares weights: what the pools save may be less than three vocabularies take.
            self._receipts.say(f"peak memory of the worker, from outside: {figures}")

    def _compare(self) -> None:
        self._receipts.heading("the same conversations, never swapped")
        for agent, results in self._turns.items():
            reference = [
                self._script.play(turn, REFERENCE, quiet=True)
                for turn in self._script.turns()
                if turn.agent == agent
            ]
            moved = any(result.usage.swap.restored for result in reference)
            same = [result.ids for result in results] == [result.ids for result in reference]
            self._receipts.check(
                f"{agent}: the same tokens as without swaps",
                same and not moved,
                f"sha256 {_hash(results)} against {_hash(reference)}",
            )

    def _kill(self) -> None:
        self._receipts.heading("kill -9 of the worker")
        kill(self._worker_pid())
        began = time.monotonic()
        result = self._script.play(Turn(CODER, "And how would you test that?"))
        usage = result.usage
        self._receipts.check(
            "coder continues its conversation",
            bool(result.ids) and usage.reused_tokens > 0 and not usage.reprefilled_tokens,
            f"{usage.reused_tokens} of {usage.prompt_tokens} tokens adopted, answered after "
            f"{duration(1000 * (time.monotonic() - began))}",
        )

    def _corrupt(self) -> None:
        self._receipts.heading("kill -9 again, and a flipped byte in what coder has parked")
        kill(self._worker_pid())
        flipped = flip_bytes(self._stage.arena_dir, CODER)
        result = self._script.play(Turn(CODER, "Thank you. One last tip?"))
        usage = result.usage
        self._receipts.check(
            "the flipped byte is found, and said so",
            flipped > 0
            and bool(result.ids)
            and usage.reprefilled_tokens > 0
            and bool(usage.reprefill_reason),
            f"{usage.reprefilled_tokens} tokens computed again ({usage.reprefill_reason})",
        )

    # --- looking ------------------------------------------------------------------------------

    def _report_of_all(self) -> StatusReport:
        """What is where, as soon as the worker's report has every model; it comes a little later
        than the answers."""
        until = time.monotonic() + WORKER_S
        while True:
            report = self._conductor.status()
            keys = [line.key for line in report.devices[0].resident]
            count = sum(key.startswith("weights:") for key in keys)
            if count == len(self._weights) or time.monotonic() > until:
                return report
            time.sleep(0.01)

    def _device(self) -> DeviceStatus:
        return self._conductor.status().devices[0]

    def _promised(self) -> list[tuple[str, int]]:
        return [(line.key, line.bytes) for line in self._device().promised.lines]

    def _allocations(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        return self._promised(), [(line.key, line.bytes) for line in self._device().resident]

    def _agree(self, device: DeviceStatus) -> bool:
        promised = {line.key: line.bytes for line in device.promised.lines}
        return all(promised.get(line.key, 0) == line.bytes for line in device.resident)

    def _estimates_over(self, device: DeviceStatus) -> int:
        """Dry-run sizes of the weights beyond what the real loads allocated."""
        found = [line.bytes for line in device.resident if line.key.startswith("weights:")]
        return sum(self._weights.values()) - sum(found)

    def _worker_pid(self) -> int:
        """Of the worker that serves now; waits until there is one."""
        until = time.monotonic() + WORKER_S
        while (worker := self._device().worker) is None:
            assert time.monotonic() < until, "the stage has a worker"
            time.sleep(0.01)
        return worker.pid


def _hash(results: Sequence[Result]) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(repr(result.ids).encode())
    return digest.hexdigest()[:12]
