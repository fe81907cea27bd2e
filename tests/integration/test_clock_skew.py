"""Hosts whose clocks disagree by years: nothing that crosses a wire is compared with a clock."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cuttable_proxy import CuttableProxy
from keyed_broker import KeyedBroker, Keys, until_in
from scene import NO_END, PLAIN, model, some_tokens, until
from vmm_rig import compile_c
from worker_process import WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
YEARS_S = 8 * 365 * 86_400
WAIT_S = 120.0


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clock")
    source = Path(__file__).parents[1] / "skewed_clock.c"
    return compile_c([source], folder / "clock.so", "-fvisibility=default", "-ldl")


def wrong_by(clock: Path, skew_s: int) -> list[str]:
    """What a command begins with, to live in another year."""
    return ["env", f"LD_PRELOAD={clock}", f"SKEWED_CLOCK_S={skew_s}"]


def now_s(enter: Sequence[str]) -> float:
    told = subprocess.run(
        [*enter, sys.executable, "-c", "import time; print(time.time())"],
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(told.stdout)


@pytest.mark.parametrize("skew_s", [-YEARS_S, YEARS_S])
def test_the_clock_is_wrong_there(clock: Path, skew_s: int) -> None:
    assert abs(now_s(wrong_by(clock, skew_s)) - time.time() - skew_s) < 60


@pytest.mark.parametrize(
    ("broker_s", "worker_s"),
    [(YEARS_S, 0), (-YEARS_S, 0), (0, YEARS_S), (0, -YEARS_S), (YEARS_S, -YEARS_S)],
)
def test_keys_requests_and_sessions_do_not_care(
    clock: Path, short_tmp: Path, broker_s: int, worker_s: int
) -> None:
    worker_key = Keys(short_tmp).new("gpu", "worker")
    broker = KeyedBroker(short_tmp, enter=wrong_by(clock, broker_s))
    with broker, CuttableProxy(None, broker.endpoints["workers"]) as wire:
        alice = until_in(broker, broker.keys.new("alice"))
        flags = ["--key", str(worker_key), "--model-dirs", str(Path(model(PLAIN)).parent)]
        enter = wrong_by(clock, worker_s)
        with WorkerProcess(short_tmp / "w", wire.endpoint, *flags, enter=enter) as worker:
            until(lambda: any(d.worker for d in alice.status().devices), "the worker is welcomed")
            alice.register("coder", model(PLAIN), n_ctx=1024, ttl_s=3600, linger_s=3600)
            reply = alice.decode(
                "coder",
                tokens=some_tokens(10, 1),
                max_tokens=300,
                logit_bias=NO_END,
                queue_ms=60_000,
                timeout_ms=60_000,
            )
            next(reply)
            wire.cut()
            usage = reply.result(WAIT_S).usage
            assert usage.generated_tokens == 300
            assert 0 <= usage.queue_ms <= usage.ttft_ms <= usage.elapsed_ms < 60_000
            lease = alice.lease("game", 1 << 20, ttl_s=3600)
            with lease:
                left_ms = alice.status().devices[0].leases[0].left_ms
                assert left_ms is not None
                assert 3_000_000 < left_ms <= 3_600_000
            # What would have gone by an hour's idleness is still there.
            assert [agent.agent for agent in alice.list()] == ["coder"]
            assert "session lost" not in worker.log


def test_where_the_time_of_day_is_read() -> None:
    """A list to think about before it grows: epochs (which only grow, on one host, and are compared
    with those of the same device), stamps of log lines, ids and keys, what a template prints, and
    what must outlive the broker on its own host."""
    found: set[str] = set()
    for part in ("protocol", "broker", "worker", "client"):
        for path in (ROOT / part / "vram_conductor").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                    "time.time",
                    "time.time_ns",
                    "time.localtime",
                    "time.gmtime",
                    "datetime.now",
                    "datetime.datetime.now",
                    "datetime.utcnow",
                ):
                    found.add(path.name)
    assert found == {"app.py", "cli_keys.py", "ids.py", "logs.py", "template.py"}
