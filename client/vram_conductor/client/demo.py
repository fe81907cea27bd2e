"""The demo: three agents, two models, a budget that holds one pool; every claim is checked."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from vram_conductor.client.board import render
from vram_conductor.client.demo_models import DemoModel, prepare
from vram_conductor.client.demo_outside import PeakMemory, flip_bytes, wait_dead
from vram_conductor.client.demo_script import CODER, N_CTX, REVIEWER, WRITER, Script, Turn
from vram_conductor.client.output import Output
from vram_conductor.client.receipts import Receipts
from vram_conductor.client.reply import Result
from vram_conductor.client.stage import Stage, StageDevice
from vram_conductor.client.sync import Conductor
from vram_conductor.client.text import duration, size, table
from vram_conductor.protocol.errors import LedgerDeny
from vram_conductor.protocol.status import DeviceStatus

SLACK_BYTES = 8 << 20
"""What the budget holds beyond all weights and the larger pool: less than the smaller pool."""

_HOST_BYTES = 512 << 20
REFERENCE = "never-swapped"


def run_demo(output: Output, *, gemma: bool) -> int:
    """Run it; exit status 0 if every claim held."""
    began = time.monotonic()
    receipts = Receipts(output)
    receipts.heading("models")
    models = prepare(output, receipts.say, N_CTX, gemma)
    budget = sum(model.weights_bytes for model in models) + SLACK_BYTES
    budget += max(model.pool_bytes for model in models)
    separate = _separate(receipts, models, budget)
    device = StageDevice(capacity_bytes=budget, host_cap_bytes=_HOST_BYTES)
    folders = sorted({str(model.path.parent) for model in models})
    with (
        Stage([device], worker=f"model_dirs = {folders!r}", say=receipts.say) as stage,
        Conductor(stage.endpoint, client="demo") as conductor,
    ):
        Demo(stage, conductor, receipts, models, budget).run(separate, output)
    receipts.heading(f"receipts ({duration(1000 * (time.monotonic() - began))})")
    output.text(receipts.closing())
    output.value({"receipts": [vars(receipt) for receipt in receipts.all]})
    return 1 if receipts.failed else 0


def _separate(receipts: Receipts, models: Sequence[DemoModel], budget: int) -> int:
    """What three processes of their own would reserve, and who would not fit."""
    receipts.heading(f"without a conductor: three processes, {size(budget)} for all")
    first, second = models
    total, rows = 0, []
    for agent, model in ((CODER, first), (REVIEWER, first), (WRITER, second)):
        own = model.weights_bytes + model.pool_bytes
        total += own
        verdict = "fits" if total <= budget else f"out of memory, short by {size(total - budget)}"
        rows.append([agent, Path(model.name).name, size(own), size(total), verdict])
    header = ["process", "model", "weights + KV + compute", "sum", ""]
    receipts.say(table(header, rows, right=(2, 3)))
    return total


class Demo:
    """The acts, in order; each checks what it claims."""

    def __init__(
        self,
        stage: Stage,
        conductor: Conductor,
        receipts: Receipts,
        models: Sequence[DemoModel],
        budget: int,
    ) -> None:
        self._stage = stage
        self._conductor = conductor
        self._receipts = receipts
        self._first, self._second = models
        self._budget = budget
        self._script = Script(conductor, receipts)

    def run(self, separate_bytes: int, output: Output) -> None:
        """All acts."""
        memory = PeakMemory(self._worker_pid())
        self._admit(output)
        self._refuse()
        turns = self._take_turns()
        self._memory(memory, separate_bytes)
        self._compare(turns)
        self._kill()
        self._corrupt()

    # --- acts ---------------------------------------------------------------------------------

    def _admit(self, output: Output) -> None:
        self._receipts.heading("with it: admission before anything is loaded")
        agents = ((CODER, self._first), (REVIEWER, self._first), (WRITER, self._second))
        for agent, model in agents:
            began = time.monotonic()
            info = self._conductor.register(agent, model.name, n_ctx=N_CTX, temperature=0).info
            assert info is not None
            took = duration(1000 * (time.monotonic() - began))
            shared = (
                f", weights shared with {', '.join(info.shared_with)}" if info.shared_with else ""
            )
            self._receipts.say(f"{agent} admitted in {took}{shared}")
        report = self._conductor.status()
        self._receipts.say(render(report, output.width - 4))
        device = report.devices[0]
        weights = [line for line in device.resident if line.key.startswith("weights:")]
        weights = [line for line in device.resident if line.key.startswith("weights:")]
        self._receipts.check(
            "one copy of the weights per model",
            len(weights) == 2,
            f"{len(weights)} copies for 3 agents, {size(sum(line.bytes for line in weights))}",
        )
        over = self._estimates_over(device)
        self._receipts.check(
            "estimates never under what was allocated",
            0 <= over <= self._budget // 100,
            f"{over} bytes over, of {size(device.resident_bytes)} allocated",
        )
        self._receipts.check(
            "promised and resident fit the budget, and agree line by line",
            max(device.promised.promised_bytes, device.resident_bytes) <= self._budget
            and self._agree(device),
            f"{size(device.promised.promised_bytes)} promised, {size(device.resident_bytes)} "
            f"resident, {size(self._budget)} budget",
        )

    def _refuse(self) -> None:
        self._receipts.heading("an agent that is too big")
        before = self._allocations()
        giant = {"model": self._first.name, "device": "cpu"}
        began = time.monotonic()
        try:
            self._conductor.register("giant", giant["model"], n_ctx=8192, device="cpu")
        except LedgerDeny as error:
            took = 1000 * (time.monotonic() - began)
            self._receipts.say(error.info.message)
            hint = error.largest_n_ctx
        else:
            self._receipts.check("refused", False, "it was admitted")
            return
        self._receipts.check(
            "refused before anything was loaded",
            self._allocations() == before,
            f"after {duration(took)}, allocations unchanged",
        )
        self._conductor.register("giant", giant["model"], n_ctx=hint, device="cpu")
        over = hint + 256
        try:
            self._conductor.register("giant-2", giant["model"], n_ctx=over, device="cpu")
            more = "admitted"
        except LedgerDeny:
            more = "refused"
        self._receipts.check(
            "admitted with the n_ctx of the hint, which is the largest",
            hint > 0 and more == "refused",
            f"n_ctx {hint} admitted, {over} {more}",
        )
        self._conductor.unregister("giant")
        self._receipts.check(
            "unregistering restores the ledger",
            self._promised() == before[0],
            f"{size(self._device().promised.promised_bytes)} promised, as before",
        )

    def _take_turns(self) -> dict[str, list[Result]]:
        self._receipts.heading("turns: coder, writer, coder, writer, coder")
        results: dict[str, list[Result]] = {CODER: [], WRITER: []}
        for turn in self._script.turns():
            results[turn.agent].append(self._script.play(turn))
        second = results[CODER][1].usage
        self._receipts.check(
            "kv_swap_evicted",
            bool(second.swap.evicted),
            ", ".join(second.swap.evicted) or "nothing had to leave",
        )
        self._receipts.check(
            "kv_swap_restored",
            second.swap.restored and second.reused_tokens > 0 and not second.reprefilled_tokens,
            f"{second.reused_tokens} of {second.prompt_tokens} tokens re-used, "
            f"{size(second.swap.bytes)} in {duration(second.swap.ms)}",
        )
        cold = self._script.cold(results[CODER])
        resumed, computed = second.swap.ms + second.prefill_ms, cold.usage.prefill_ms
        self._receipts.check(
            "resuming beats computing it again",
            resumed < computed,
            f"{duration(resumed)} against {duration(computed)} for the same "
            f"{cold.usage.prompt_tokens} tokens ({computed / max(resumed, 0.1):.0f} x)",
        )
        return results

    def _memory(self, memory: PeakMemory, separate_bytes: int) -> None:
        peak = memory.stop() - memory.first_bytes
        self._receipts.check(
            "peak memory of the worker, seen from outside",
            peak < separate_bytes,
            f"{size(peak)} beyond its idle {size(memory.first_bytes)} (buffers at most "
            f"{size(self._budget)}, the rest is vocabularies); three processes would hold "
            f"{size(separate_bytes)} of buffers",
        )

    def _compare(self, turns: dict[str, list[Result]]) -> None:
        self._receipts.heading("the same conversations, never swapped")
        for agent, results in turns.items():
            reference = [
                self._script.play(turn, REFERENCE, quiet=True)
                for turn in self._script.turns()
                if turn.agent == agent
            ]
            moved = any(result.usage.swap.restored for result in reference)
            same = [result.ids for result in results] == [result.ids for result in reference]
            self._receipts.check(
                f"{agent}: token hash equals that of a run without swaps",
                same and not moved,
                f"{_hash(results)} against {_hash(reference)}",
            )

    def _kill(self) -> None:
        self._receipts.heading("kill -9 of the worker")
        self._kill_worker()
        began = time.monotonic()
        result = self._script.play(Turn(CODER, "And how would you test that?"))
        usage = result.usage
        self._receipts.check(
            "coder continues its conversation",
            bool(result.ids) and usage.reused_tokens > 0 and not usage.reprefilled_tokens,
            f"{usage.reused_tokens} of {usage.prompt_tokens} tokens adopted from shared memory, "
            f"answered {duration(1000 * (time.monotonic() - began))} after the kill",
        )

    def _corrupt(self) -> None:
        self._receipts.heading("a flipped byte in a parked state, and kill -9 again")
        flipped = flip_bytes(self._stage.arena_dir, CODER)
        self._kill_worker()
        result = self._script.play(Turn(CODER, "Thank you. One last tip?"))
        usage = result.usage
        self._receipts.check(
            "detected, re-prefilled, said so",
            flipped > 0
            and bool(result.ids)
            and usage.reprefilled_tokens > 0
            and bool(usage.reprefill_reason),
            f"{usage.reprefilled_tokens} tokens computed again: {usage.reprefill_reason}",
        )

    # --- looking ------------------------------------------------------------------------------

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
        return self._first.weights_bytes + self._second.weights_bytes - sum(found)

    def _worker_pid(self) -> int:
        worker = self._device().worker
        return worker.pid if worker else 0

    def _kill_worker(self) -> None:
        pid = self._worker_pid()
        os.kill(pid, signal.SIGKILL)
        wait_dead(pid, 10)


def _hash(results: Sequence[Result]) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(repr(result.ids).encode())
    return digest.hexdigest()[:12]
