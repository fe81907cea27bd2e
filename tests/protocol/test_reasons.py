"""What a reason means and what to do: one source, whole, current, and true."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import cast

import pytest

from vram_conductor.broker.ledger.decisions import DenyCode
from vram_conductor.client import cli
from vram_conductor.protocol import reasons_page
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.reasons import codes, has_more, mentioned, near, parse, reasons

ROOT = Path(__file__).resolve().parents[2]
SPEC = """
### Reasons

#### Jobs

| reason | code | retryable | when, and what to do |
| --- | --- | --- | --- |
| `queue_full` | RESOURCE_EXHAUSTED, OUT_OF_RANGE | sometimes | see [Queue](#queue); a \\| b |

| other | table |
| --- | --- |
| `no_reason` | here |
"""


def test_a_table_is_read_as_it_is_written() -> None:
    (reason,) = parse(SPEC, {"queue_full": ["Wait."]}).values()
    assert (reason.name, reason.group, reason.retryable) == ("queue_full", "Jobs", "sometimes")
    assert reason.codes == ("RESOURCE_EXHAUSTED", "OUT_OF_RANGE")
    assert reason.text == "see Queue in SPEC.md; a | b"
    assert reason.steps == ("Wait.",)


def test_every_reason_says_what_to_do() -> None:
    lacking = [name for name, reason in reasons().items() if not reason.steps]
    assert not lacking, f"add to protocol/vram_conductor/protocol/advice.toml: {lacking}"


def test_every_word_of_a_receipt_is_known() -> None:
    """Those that the worker gives, and the broker's own."""
    pattern = re.compile(r'"((?:state|rollback|not|other|kv)_[a-z]+)(?:"|: )')
    files = [
        *(
            ROOT / "worker/vram_conductor/worker" / f"{name}.py"
            for name in ("parking", "seating", "adoption", "copying")
        ),
        ROOT / "broker/vram_conductor/broker/jobs/ending.py",
    ]
    used = {word for file in files for word in pattern.findall(file.read_text("utf-8"))}
    used -= {"state_in", "state_out"}  # of MoveRate
    assert {"state_missing", "not_parked", "other_build", "kv_quota"} <= used
    assert used <= reasons().keys(), "add them to SPEC.md, Words of receipts, and to advice.toml"
    words = {name for name, reason in reasons().items() if not reason.codes}
    assert words <= used, "nothing says these any more"


def test_every_code_of_a_refusal_is_advised() -> None:
    steps = " ".join(reasons()[LEDGER_DENY].steps)
    assert [code for code in DenyCode if f"code={code}" not in steps] == []


def test_advice_is_not_to_send_again_what_was_half_answered() -> None:
    for name in ("draining", "worker_left", "worker_lost"):
        steps = reasons()[name].steps
        kept = [step for step in steps if "conductor history AGENT" in step]
        assert len(kept) == 1
        assert '`conductor decode AGENT "Go on."`' in kept[0]
        again = [step for step in steps if re.search("send it again", step, re.IGNORECASE)]
        assert all(step.startswith("Nothing was said?") for step in again)


def test_nothing_is_advised_for_what_does_not_exist() -> None:
    folder = ROOT / "protocol" / "vram_conductor" / "protocol"
    advice = tomllib.loads((folder / "advice.toml").read_text("utf-8"))
    assert advice.keys() <= reasons().keys()
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    include = packaged["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert include["protocol/SPEC.md"] == "vram_conductor/protocol/SPEC.md"


def test_the_page_is_current(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert reasons_page.main(["--check"]) == 0, capsys.readouterr().err
    old = tmp_path / "errors.md"
    assert reasons_page.main(["--check", "--page", str(old)]) == 1
    assert reasons_page.main(["--page", str(old)]) == 0
    assert reasons_page.main(["--check", "--page", str(old)]) == 0
    text = old.read_text("utf-8")
    old.write_text(text.replace("`no_worker`", "`no_woker`"), "utf-8")
    assert reasons_page.main(["--check", "--page", str(old)]) == 1


def test_codes_and_exit_statuses_are_those_of_the_code() -> None:
    assert list(codes()) == [str(code) for code in Code]
    assert {str(code): status for code, status in cli._EXIT.items()} == reasons_page._EXIT


def test_what_may_have_been_meant() -> None:
    known = reasons()
    assert near("no_workr", known)[0] == "no_worker"
    assert near("ledger deny", known)[0] == "VRAM_LEDGER_DENY"
    assert "journal_corrupt" in near("journal", known)
    assert near("zzzzzz", known) == []
    assert near("", known) == []


def test_a_line_of_a_log_names_its_reason() -> None:
    known = reasons()
    assert mentioned("conductor: connection closed, timeout (no_worker)", known) == ["no_worker"]
    assert mentioned("event=refused reason=device_taken", known) == ["device_taken"]
    assert mentioned("Vram_Ledger_Deny code=CAP", known) == ["VRAM_LEDGER_DENY"]
    assert mentioned("nothing of the kind", known) == []


def test_more_is_offered_where_there_is_more() -> None:
    assert has_more("no_worker")
    assert not has_more("no_such_key")
    assert not has_more("from_the_future")


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(cast("argparse._SubParsersAction[argparse.ArgumentParser]", action).choices)
    return {}


TYPED = sorted(
    {
        (name, text)
        for name, reason in reasons().items()
        for line in (*reason.steps, reason.text)
        for text in re.findall(r"`(conductor [^`]+)`", line)
    }
)


def test_what_is_to_be_typed_exists() -> None:
    assert len(TYPED) > 60
    unknown: list[str] = []
    for name, text in TYPED:
        parser, words = cli.parser(), text.split()[1:]
        while words and (found := commands(parser).get(words[0])):
            parser, words = found, words[1:]
        if commands(parser) and words and not words[0].startswith("-") and words[0].islower():
            unknown.append(f"{name}: {text}: no command {words[0]}")
        if parser.prog.split()[-1] in ("broker", "worker"):
            continue  # their flags are their own parsers'
        flags = {word for word in words if word.startswith("--")}
        unknown += [
            f"{name}: {text}: no {flag}" for flag in flags - set(parser._option_string_actions)
        ]
    assert not unknown, "\n".join(unknown)
