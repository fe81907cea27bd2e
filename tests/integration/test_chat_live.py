"""``conductor chat`` in a terminal of its own and in a pipe, with a real model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scene import PLAIN, Scene, model, until
from terminal import PATIENCE_S, Terminal

from vram_conductor.client.history import History
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.values import Message

CHAT = [sys.executable, "-m", "vram_conductor.client.cli", "chat"]
FLAGS = ["--temperature", "0", "--max-tokens", "6"]
UP = "\x1b[A"


@pytest.fixture
def talker(scene: Scene, smollm2: Path) -> Scene:
    scene.conductor.register("talker", str(smollm2), n_ctx=1024)
    return scene


@contextmanager
def chatting(scene: Scene, *flags: str, agent: str = "talker") -> Generator[Terminal]:
    command = [*CHAT, agent, *flags, "--clients", scene.stage.endpoint]
    with Terminal(command, columns=100) as terminal:
        terminal.expect("Ctrl-D leaves")
        at_prompt(terminal)
        yield terminal


def at_prompt(terminal: Terminal) -> None:
    """Wait until keys are the line editor's: before, the terminal takes them as it likes."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not terminal.text.endswith("> "):
        assert terminal.read(), terminal.text
        assert time.monotonic() < give_up_s, terminal.text


def piped(scene: Scene, text: str, *flags: str, agent: str = "talker") -> tuple[int, str, str]:
    done = subprocess.run(
        [*CHAT, agent, *flags, "--clients", scene.stage.endpoint],
        input=text.encode(),
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def told(scene: Scene, conversation: str = "main", turns: int = 0) -> History:
    """The history, once it has so many turns."""

    def enough() -> History | None:
        names = [item.conversation for item in scene.agent("talker").conversations]
        if conversation not in names:
            return None
        found = scene.conductor.history("talker", conversation)
        return found if found.turns_total >= turns else None

    found = until(enough, f"{turns} turns of {conversation}")
    assert found is not None
    return found


def pairs(found: History) -> list[tuple[str, str | None]]:
    return [(turn.role, turn.text) for turn in found.turns]


def test_a_sitting(talker: Scene, tmp_path: Path) -> None:
    with chatting(talker, *FLAGS, "--receipt", "--system", "Be brief.") as terminal:
        assert "talker, conversation main: nothing said yet" in terminal.text
        terminal.press("Name a colour.\r")
        terminal.expect("version 1]")
        first = told(talker, turns=3)
        assert pairs(first)[:2] == [("system", "Be brief."), ("user", "Name a colour.")]
        assert str(first.turns[2].text).strip() in " ".join(terminal.text.split())

        terminal.press("one\\\rtwo\r")
        terminal.expect("version 2]")
        terminal.press('"""\r/quit is no command here\r\rend\r"""\r')
        terminal.expect("version 3]")
        asked = [turn.text for turn in told(talker, turns=7).turns if turn.role == "user"]
        assert asked == ["Name a colour.", "one\ntwo", "/quit is no command here\n\nend"]

        terminal.press("/history\r")
        terminal.expect("assistant:")
        terminal.press(f"/save {tmp_path}/talk.json\r")
        terminal.expect("7 turns saved to")
        terminal.press("/reset\r")
        terminal.expect("this is a new conversation")
        assert told(talker).tokens == 0
        terminal.press("/nonsense\r")
        terminal.expect("there is no command /nonsense")
        terminal.press("/load /nowhere/x\r")
        terminal.expect("No such file or directory: /nowhere/x")
        terminal.press("/load\r")
        terminal.expect("/load needs a FILE")
        terminal.press(f"/load {tmp_path}/talk.json\r")
        terminal.expect("7 turns loaded")
        terminal.press("And then?\r")
        terminal.expect("version 5]")
        whole = told(talker, turns=9)
        assert pairs(whole)[:7] == pairs_of_file(tmp_path / "talk.json")
        assert pairs(whole)[7] == ("user", "And then?")

        terminal.press("/fork side\r")
        terminal.expect("this is side now, a copy of")
        terminal.press("Only here.\r")
        terminal.expect("version 2]")
        at_prompt(terminal)
        terminal.press("\x04")
        assert terminal.wait() == 0
    assert pairs(told(talker, "side"))[9] == ("user", "Only here.")
    assert told(talker).turns_total == 9


def pairs_of_file(path: Path) -> list[tuple[str, str | None]]:
    saved = json.loads(path.read_text())
    return [(turn.get("role", ""), turn["text"]) for turn in saved["turns"]]


def test_lines_can_be_edited_and_called_back(talker: Scene) -> None:
    with chatting(talker, *FLAGS, "--receipt") as terminal:
        terminal.press("helxo\x1b[D\x7fl\r")
        terminal.expect("version 1]")
        at_prompt(terminal)
        terminal.press(UP + "!\r")
        terminal.expect("version 2]")
        terminal.press("/quit\r")
        assert terminal.wait() == 0
    asked = [turn.text for turn in told(talker).turns if turn.role == "user"]
    assert asked == ["hello", "hello!"]


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(talker: Scene) -> None:
    with chatting(talker, "--temperature", "0", "--receipt") as terminal:
        terminal.press("Tell me a very long story about a lighthouse and the sea.\r")
        running = until(
            lambda: [job for job in talker.conductor.status().jobs if job.generated_tokens > 3],
            "it talks",
        )
        assert running
        terminal.press("\x03")
        terminal.expect("cancelled; the conversation keeps what was said")
        cut = told(talker, turns=2)
        assert cut.version == 1
        assert cut.turns[1].text
        # At the prompt it only throws the line away.
        at_prompt(terminal)
        terminal.press("not this\x03")
        terminal.expect("(Ctrl-D or /quit leaves)")
        terminal.press("/history\r")
        terminal.expect("assistant:")
        terminal.press("/quit\r")
        assert terminal.wait() == 0
    after = told(talker)
    assert after == cut
    agent = talker.conductor.agent("talker")
    assert agent.chat("Go on.", max_tokens=4).result().usage.reprefilled_tokens == 0


def test_an_agent_that_is_not_there(scene: Scene) -> None:
    code, out, err = piped(scene, "hello\n", agent="nobody")
    assert (code, out) == (4, "")
    assert "no agent named 'nobody'" in err


@pytest.mark.parametrize("how", ["typed", "piped"])
def test_a_model_without_a_template_is_offered_plain_text(scene: Scene, how: str) -> None:
    scene.conductor.register("talker", model(PLAIN), n_ctx=256)
    if how == "piped":
        code, out, err = piped(scene, "Once upon\n", *FLAGS)
        assert (code, out) == (1, "")
        assert "no chat template" in err
        assert "conductor chat --raw talker" in err
        code, out, err = piped(scene, "Once upon\n a time\n", *FLAGS, "--raw")
        assert (code, err) == (0, "")
    else:
        with chatting(scene, *FLAGS) as terminal:
            terminal.press("Once upon\r")
            terminal.expect("/raw sends what you typed as that")
            terminal.press("/raw\r")
            terminal.expect("plain text to continue now")
            assert told(scene, turns=2).turns[0].text == "Once upon"
            terminal.press(" a time\r")
            told(scene, turns=4)
            at_prompt(terminal)
            terminal.press("\x04")
            assert terminal.wait() == 0
    found = told(scene)
    assert [(turn.role, turn.generated) for turn in found.turns] == [("", False), ("", True)] * 2
    assert [turn.text for turn in found.turns[::2]] == ["Once upon", " a time"]


def test_in_a_pipe(talker: Scene) -> None:
    code, out, err = piped(talker, "Name a colour.\nAnd\\\nanother?\n/quit\nnever\n", *FLAGS)
    assert (code, err) == (0, "")
    found = told(talker)
    asked = [turn.text for turn in found.turns if turn.role == "user"]
    assert asked == ["Name a colour.", "And\nanother?"]
    answers = [str(turn.text) for turn in found.turns if turn.generated]
    assert out == "".join(f"{answer}\n" for answer in answers)

    code, out, err = piped(talker, "Go on.", *FLAGS, "--json")
    assert json.loads(out)["text"] == told(talker).turns[-1].text
    code, out, err = piped(talker, "/history\n/help\n", *FLAGS)
    assert (code, out.count("user:")) == (0, 3)
    assert "/load FILE" in err
    code, out, err = piped(talker, "/nonsense\nnever\n", *FLAGS)
    assert (code, out) == (8, "")


def test_what_is_piped_must_be_text(talker: Scene) -> None:
    done = subprocess.run(
        [*CHAT, "talker", "--clients", talker.stage.endpoint],
        input=b"ab\xff\n",
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 8
    assert b"not UTF-8 (byte 2 of a line)" in done.stderr


def test_commands_show_and_copy(talker: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    from vram_conductor.client import cli

    def conductor(*arguments: str) -> tuple[int, str]:
        code = cli.main([*arguments, "--clients", talker.stage.endpoint])
        return code, capsys.readouterr().out

    agent = talker.conductor.agent("talker")
    messages = [Message("user", "Name a colour.")]
    answer = agent.chat(messages, max_tokens=4, temperature=0).result()
    code, out = conductor("fork", "talker", "side")
    assert code == 0
    assert out.startswith("talker: side is a copy of main at version 1, ")
    assert "KV copied" in out
    assert conductor("fork", "talker", "side")[0] == 5
    code, out = conductor("history", "talker", "--conversation", "side", "--json")
    found = json.loads(out)
    assert [turn["text"] for turn in found["turns"]] == ["Name a colour.", answer.text]
    assert found["ids"] is None
    code, out = conductor("history", "talker", "--last", "1")
    assert out.startswith("assistant:\n")
    code, out = conductor("history", "talker", "--ids")
    assert len(out.split()) == found["tokens"]
    assert conductor("reset", "talker", "--conversation", "side", "--forget")[0] == 0
    assert conductor("history", "talker", "--conversation", "side")[0] == 4
    assert conductor("fork", "talker", "a/b")[0] == 8
    assert agent.history().turns[0] == Turn(
        role="user", text="Name a colour.", end=found["turns"][0]["end"]
    )


def test_turns_without_roles_can_be_loaded_into_a_chat(talker: Scene, tmp_path: Path) -> None:
    agent = talker.conductor.agent("talker")
    agent.decode(prompt="Once upon", max_tokens=4, temperature=0).result()
    agent.decode(tokens=[504, 657], continue_=True, max_tokens=2, temperature=0).result()
    path = tmp_path / "raw.json"
    code, _, err = piped(talker, f"/save {path}\n")
    assert code == 0
    assert "4 turns saved" in err
    assert "1 of them not known as text, so it cannot be loaded" in err
    code, _, err = piped(talker, f"/load {path}\n")
    assert code == 8
    assert "does not have the text of turn 3 of 4 (bad_chat_file)" in err
    saved = json.loads(path.read_text())
    saved["turns"] = saved["turns"][:2]
    path.write_text(json.dumps(saved))
    code, _, err = piped(talker, f"/load {path}\nAnd now?\n", *FLAGS)
    assert code == 0
    roles = [turn.role for turn in told(talker).turns]
    assert roles == ["user", "assistant", "user", "assistant"]
