"""``conductor explain``, hints behind errors, and the width of what is said."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from vram_conductor.client import chat, cli
from vram_conductor.client.complaint import explain
from vram_conductor.client.output import Output
from vram_conductor.protocol.errors import LedgerDeny, OutOfRange, ResourceExhausted, Unavailable
from vram_conductor.protocol.reasons import reasons

WIDTH = 80


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    status = cli.main(["explain", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def test_it_says_what_a_reason_means_and_what_to_do(capsys: Any) -> None:
    status, out, _ = run(capsys, "no_worker")
    assert status == 0
    assert out.startswith("no_worker (UNAVAILABLE)\n")
    assert "what to do:\n  - `conductor status`" in out
    assert "the same request may succeed later\n" in out


def test_a_whole_line_will_do(capsys: Any) -> None:
    line = "conductor: the conversation is at version 3, not 2 (version_mismatch)"
    for words in ([line], line.split()):
        status, out, _ = run(capsys, *words)
        assert (status, out.splitlines()[0]) == (0, "version_mismatch (ABORTED)")


def test_a_receipts_word_is_known_too(capsys: Any) -> None:
    status, out, _ = run(capsys, "[prompt 9 (2 re-used); re-prefilled 7: other_build; seed 1]")
    assert (status, out.splitlines()[0]) == (0, "other_build (in receipts)")
    assert "what to do:" in out
    assert "may succeed later" not in out
    names = [line for line in run(capsys, "not_copied: arena_full")[1].splitlines() if "(" in line]
    assert names[0] == "not_copied (in receipts)"
    assert "arena_full (RESOURCE_EXHAUSTED)" in names


def test_nothing_of_that_name(capsys: Any) -> None:
    status, out, err = run(capsys, "no_workr")
    assert (status, out) == (4, "")
    assert "near it: no_worker" in err
    assert "(no_such_reason)" in err
    assert "lists all" in run(capsys, "zzzzzzz")[2]


def test_a_code_lists_its_reasons(capsys: Any) -> None:
    status, out, _ = run(capsys, "data_loss")
    assert status == 0
    assert out.startswith("DATA_LOSS: something stored is damaged\n")
    assert "journal_corrupt" in out


def test_without_a_word_it_lists_all(capsys: Any) -> None:
    status, out, _ = run(capsys)
    assert status == 0
    assert set(reasons()) <= set(out.split())


def test_json_has_the_same(capsys: Any) -> None:
    (reason,) = json.loads(run(capsys, "queue_full", "--json")[1])["reasons"]
    assert reason["name"] == "queue_full"
    assert reason["steps"] == list(reasons()["queue_full"].steps)
    assert len(json.loads(run(capsys, "--json")[1])["reasons"]) == len(reasons())
    status, out, _ = run(capsys, "no_workr", "--json")
    assert status == 4
    assert json.loads(out)["error"]["details"]["near"][0] == "no_worker"


@pytest.mark.parametrize("name", reasons())
def test_every_reason_fits_the_terminal(capsys: Any, name: str) -> None:
    status, out, _ = run(capsys, name)
    assert status == 0
    # Only what must not be broken, such as a command's long word, may be wider.
    wide = [line for line in out.splitlines() if len(line) > WIDTH and " " in line.strip("- ")]
    assert not wide


# --- hints ----------------------------------------------------------------------------------------


class Watched(io.StringIO):
    """A stderr that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_where_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Watched()
    output = Output(json=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    output.complain(ResourceExhausted("quota_exceeded", "too many agents"))
    assert terminal.getvalue().splitlines() == [
        "conductor: too many agents (quota_exceeded)",
        "conductor: what to do: conductor explain quota_exceeded",
    ]
    output.complain(OutOfRange("prompt_too_long", "too long"), "decode", "coder")
    output.complain(LedgerDeny("VRAM_LEDGER_DENY", "VRAM_LEDGER_DENY code=CAP"))
    output.complain(OutOfRange("from_the_future", "new"))
    assert terminal.getvalue().count("explain") == 1


def test_a_log_is_not(capsys: Any) -> None:
    Output(json=False).complain(ResourceExhausted("quota_exceeded", "too many agents"))
    assert capsys.readouterr().err == "conductor: too many agents (quota_exceeded)\n"


def test_a_hint_names_the_agent_that_was_meant() -> None:
    error = OutOfRange("prompt_too_long", "too long")
    assert explain(error, "decode", "coder --conversation x")[1] == (
        "forget the conversation: conductor reset coder --conversation x"
    )
    assert explain(error, "chat", "coder")[1] == "/reset forgets the conversation"


@pytest.mark.parametrize("reason", ["draining", "worker_left", "worker_lost"])
def test_what_was_half_said_is_continued_and_not_sent_again(reason: str) -> None:
    cut = Unavailable(reason, "cut", retryable=True, retry_after_ms=2_000, generated_tokens=3)
    assert explain(cut, "decode", "coder --conversation x") == [
        f"cut ({reason})",
        "the answer so far is kept: conductor history coder --conversation x; continue it: "
        'conductor decode coder --conversation x "Go on."',
    ]
    (_, hint) = explain(cut, "chat")
    assert "go on" in hint
    assert "conductor decode" not in hint
    unsaid: list[dict[str, Any]] = [{}, {"generated_tokens": 0}, {"generated_tokens": "many"}]
    for details in unsaid:
        lost = Unavailable(reason, "lost", retryable=True, retry_after_ms=2_000, **details)
        assert explain(lost, "decode", "coder") == [f"lost ({reason})", "try again in 2.00 s"]


# --- help -----------------------------------------------------------------------------------------


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and all below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices = cast("argparse._SubParsersAction[argparse.ArgumentParser]", action).choices
            for each in choices.values():
                yield from parsers(each)


def too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > WIDTH]


def test_no_help_is_wider_than_a_terminal() -> None:
    found = {each.prog: too_wide(each.format_help()) for each in parsers(cli.parser())}
    assert len(found) > 30
    assert {prog: lines for prog, lines in found.items() if lines} == {}
    assert too_wide(chat.HELP) == []


@pytest.mark.parametrize("part", ["broker", "worker"])
def test_nor_is_that_of_broker_and_worker(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vram_conductor.client.cli", part, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(done.stdout.splitlines()) > 20
    assert too_wide(done.stdout) == []
