"""``conductor bench pipeline``: a small run on threads, as a user does it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from terminal import Terminal

from vram_conductor.client.bench_pipeline import headline
from vram_conductor.client.bench_setting import ask_worker
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import Internal

MIB = 1 << 20

SMALL = ["--n-layers", "3", "--bytes-per-layer", "64KiB", "--compute-iters", "3", "--repeats", "2"]

HEADLINE = re.compile(
    r"HEADLINE: serial=(\d+\.\d\d) ms, overlapped=(\d+\.\d\d) ms, "
    r"savings=(-?\d+\.\d) %, speedup=(\d+\.\d{3})x"
)


def test_the_headline_is_that_of_the_design() -> None:
    """The figures of the first demonstration of this schedule."""
    line = headline(151.41, 117.85)
    expected = "serial=151.41 ms, overlapped=117.85 ms, savings=22.2 %, speedup=1.285x"
    assert line == f"HEADLINE: {expected}"
    assert HEADLINE.fullmatch(line)
    assert HEADLINE.fullmatch(headline(1.0, 2.0)), "a loss is said as one"


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pipeline.json"
    assert main(["bench", "pipeline", *SMALL, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    first = HEADLINE.fullmatch(text.splitlines()[0])
    assert first is not None
    assert "no GPU" in text
    assert "3 x 64.0 KiB through 2 slots, 3 iterations per layer" in " ".join(text.split())
    assert re.search(r"^layer +transfer ms +compute ms$", text, re.MULTILINE)
    value = json.loads(file.read_text())
    assert value["headline"] == first[0]
    found = {figure["key"]: figure["value"] for figure in value["figures"]}
    assert float(first[1]) == pytest.approx(found["serial"], abs=0.005)
    assert float(first[2]) == pytest.approx(found["overlapped"], abs=0.005)
    assert float(first[4]) == pytest.approx(found["speedup"], abs=0.0005)
    total, longer = found["transfer"] + found["compute"], max(found["transfer"], found["compute"])
    assert found["bound"] == pytest.approx(total / longer)
    assert found["share"] == pytest.approx(100 * longer / found["overlapped"])
    assert all(figure["wanted"] is None for figure in value["figures"]), "a CPU owes nothing"
    assert value["setting"]["bytes_per_layer"] == 64 << 10
    (row,) = value["data"]["rows"]
    for layer, ms in enumerate(row["unit_compute_ms"]):
        assert re.search(rf"^ *{layer} +\S+ +{ms:.3f}$", text, re.MULTILINE)


def test_the_default_finds_its_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--n-layers", "2", "--bytes-per-layer", "256KiB", "--repeats", "1", "--json"]
    assert main(["bench", "pipeline", *flags]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["data"]["rows"][0]["aim"] == 1.0
    assert value["data"]["rows"][0]["iterations"] >= 1


def test_a_grid_that_has_little_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--grid", "--seconds", "1", "--json"]) == 0
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert len(value["data"]["rows"]) >= 1
    assert any("no time was left" in note for note in value["notes"])
    assert "medians of 3 rounds" in value["notes"]
    assert value["data"]["seconds"].keys() == {"layers", "iterations", "passes"}
    assert re.search(r"^1 of 6: 16 layers of 4 MiB at C/T 1$", said.err, re.MULTILINE)


def test_what_the_worker_says_last_is_told_if_it_gives_no_answer() -> None:
    news: list[str] = []
    with pytest.raises(Internal, match="invalid choice: 'no-such-bench'"):
        ask_worker("no-such-bench", news=news.append)
    assert not news


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_into_a_terminal(columns: int) -> None:
    command = [sys.executable, "-m", "vram_conductor.client.cli", "bench", "pipeline", *SMALL]
    with Terminal(command, columns=columns, rows=60) as terminal:
        assert terminal.wait() == 0
        lines = [line for line in terminal.text.splitlines() if "bench pipeline" not in line]
    assert max(map(len, lines)) <= columns
    assert any(HEADLINE.fullmatch(line) for line in lines)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--n-layers", "0"], "bad_layers"),
        (["--slots", "5"], "bad_slots"),
        (["--slots", "1"], "bad_slots"),
        (["--bytes-per-layer", "66"], "bad_layer_bytes"),
        (["--bytes-per-layer", "0"], "bad_layer_bytes"),
        (["--bytes-per-layer", "many"], "bad_size"),
        (["--repeats", "0"], "bad_repeats"),
        (["--compute-iters", "-1"], "bad_iterations"),
        (["--bytes-per-layer", "64TiB"], "host_memory_short"),
        (["--device", "tpu"], "no_such_device"),
        (["--batch", "4"], "not_together"),
        (["--resident", "0"], "not_together"),
        (["--model", "x.gguf", "--slots", "2"], "not_together"),
        (["--random", "tiny-1", "--grid"], "not_together"),
        (["--grid", "--n-layers", "8"], "not_together"),
        (["--random", "tiny-1,tiny-2"], "bad_value"),
        (["--random", "13T"], "unknown_size"),
        (["--model", "/no/such/file.gguf"], "no_such_model"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pipeline", *flags]) != 0
    said = capsys.readouterr()
    assert f"({reason})" in said.err
    assert not said.out
