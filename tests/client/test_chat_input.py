"""What is typed into ``conductor chat``, and its files."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client import chat_file
from vram_conductor.client.chat_input import ChatInput, Typed
from vram_conductor.client.transcript_view import render_turns
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.errors import InvalidArgument


def reading(lines: list[str], *, is_terminal: bool = True) -> Iterator[Typed]:
    rest = iter(lines)

    def line(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    typed = ChatInput(line, is_terminal=is_terminal)
    while (found := typed.read()) is not None:
        yield found


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["hello"], ["hello"]),
        (["", "   ", "a", "b"], ["a", "b"]),
        (["one \\", "two\\", "three"], ["one \ntwo\nthree"]),
        (['"""', "one", "", "two", '"""'], ["one\n\ntwo"]),
        (['"""one', 'two"""', "three"], ["one\ntwo", "three"]),
        (['"""one"""'], ["one"]),
        (['"""', '"""', "x"], ["x"]),
        (['"""', "/quit", "a\\", '"""'], ["/quit\na\\"]),
        (["//etc is a folder"], ["/etc is a folder"]),
        (["a /b"], ["a /b"]),
        ([" /b"], [" /b"]),
    ],
)
def test_messages(lines: list[str], expected: list[str]) -> None:
    for is_terminal in (True, False):
        found = list(reading(lines, is_terminal=is_terminal))
        assert found == [Typed(text) for text in expected]


@pytest.mark.parametrize(
    ("line", "word", "rest"),
    [
        ("/quit", "quit", ""),
        ("/save  my file.json ", "save", "my file.json"),
        ("/", "", ""),
    ],
)
def test_commands(line: str, word: str, rest: str) -> None:
    (typed,) = reading([line])
    assert typed.is_command
    assert typed.command == (word, rest)


@pytest.mark.parametrize("lines", [["one\\"], ['"""', "one"]])
def test_a_text_without_an_end_is_sent_where_it_was_piped(lines: list[str]) -> None:
    assert list(reading(lines)) == []
    assert [typed.text for typed in reading(lines, is_terminal=False)] == ["one"]


@given(st.lists(st.text(max_size=12).filter(lambda line: "\n" not in line and "\r" not in line)))
def test_whatever_is_typed_it_ends(lines: list[str]) -> None:
    for is_terminal in (True, False):
        found = list(reading(lines, is_terminal=is_terminal))
        assert len(found) <= len(lines)
        assert all(typed.text.strip() for typed in found)


# --- files ---


def test_a_conversation_comes_back_from_its_file(tmp_path: Path) -> None:
    turns = [Turn(role="user", text="Grüße\n"), Turn(role="assistant", text="", generated=True)]
    path = tmp_path / "talk.json"
    chat_file.save(str(path), "coder", "main", turns)
    assert chat_file.load(str(path)) == turns
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    chat_file.save(str(path), "coder", "main", [])
    assert chat_file.load(str(path)) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no saved conversation"),
        ("[1]", "no saved conversation"),
        ("[" * 100_000, "no saved conversation"),
        ('{"conductor_chat": 1}', "no saved conversation"),
        (
            '{"conductor_chat": 2, "agent": "a", "conversation": "b", "turns": []}',
            "has format 2",
        ),
        (
            '{"conductor_chat": 1, "agent": "a", "conversation": "b", "turns": [{"role": "user"}]}',
            "the text of turn 1 of 1",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=said) as caught:
        chat_file.load(str(path))
    assert caught.value.reason == "bad_chat_file"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        chat_file.save(str(tmp_path / "nowhere" / "x"), "a", "b", [])
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        chat_file.save(str(tmp_path / "folder"), "a", "b", [])
    assert [item.name for item in tmp_path.iterdir()] == ["folder"]


def test_turns_are_drawn_one_after_the_other() -> None:
    turns = [
        Turn(role="user", text="one\n\ntwo"),
        Turn(role="assistant", text="so", generated=True),
        Turn(),
        Turn(text="on", generated=True),
    ]
    assert render_turns(turns, forgotten=2).splitlines() == [
        "(2 earlier turns not kept)",
        "user:",
        "  one",
        "",
        "  two",
        "assistant:",
        "  so",
        "input:",
        "  (not known as text: only its token ids are kept)",
        "generated:",
        "  on",
    ]
    assert json.dumps(render_turns([])) == '""'
