"""The journal as a file: crashes at any byte, damage, full disks, rewriting."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vram_conductor.broker.journal import files as journal_file
from vram_conductor.broker.journal import format as journal_format
from vram_conductor.broker.journal.journal import GROUP_COMMIT_NS, RETRY_NS, Journal
from vram_conductor.broker.journal.opening import JOURNAL_NAME, Opened, open_journal
from vram_conductor.broker.journal.records import (
    AgentRegistered,
    AgentRemoved,
    AgentSpec,
    AgentUsed,
    BrokerEpoch,
    ConversationCommitted,
    Record,
)
from vram_conductor.broker.journal.replay import encode
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.protocol.errors import DataLoss, FailedPrecondition, Unavailable
from vram_conductor.protocol.values import AgentKey, ConversationKey, ModelInfo

MODEL = ModelInfo(
    model="abc",
    name="smol",
    path="/models/smol.gguf",
    file_bytes=100,
    arch="llama",
    n_ctx_train=2048,
    n_vocab=49152,
    chat_template=True,
)
KEY = ConversationKey("local", "coder", "main")


class Lines:
    """A log that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __call__(self, level: str, event: str, /, **fields: Any) -> None:
        self.lines.append((level, event, fields))

    def events(self) -> list[str]:
        return [event for _, event, _ in self.lines]


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def agent(name: str = "coder") -> AgentRegistered:
    spec = AgentSpec(model="smol", n_ctx=1024)
    return AgentRegistered(agent=AgentKey("local", name), spec=spec, device="cpu", model=MODEL)


def commit(version: int, keep: int, ids: list[int]) -> ConversationCommitted:
    raw = b"".join(i.to_bytes(4, "little") for i in ids)
    return ConversationCommitted(conversation=KEY, version=version, keep=keep, ids=raw)


def start(folder: Path, **how: Any) -> tuple[Journal, Restored, Lines]:
    log = Lines()
    opened = open_journal(folder, log, skip_corrupt=how.pop("skip_corrupt", False))
    return Journal(opened, log, **how), opened.restored, log


def restored(folder: Path, **how: Any) -> Restored:
    opened = open_journal(folder, Lines(), **how)
    os.close(opened.fd)
    return opened.restored


def fold(records: list[Record]) -> Restored:
    state = Restored()
    for record in records:
        state.apply(record)
    return state


HISTORY: list[Record] = [
    BrokerEpoch(broker_epoch=7),
    agent("coder"),
    agent("writer"),
    commit(1, 0, [1, 2, 3]),
    commit(2, 3, [4, 5]),
    AgentUsed(agent=AgentKey("local", "writer"), used_unix_ns=5),
    AgentRemoved(agent=AgentKey("local", "writer")),
    AgentUsed(agent=AgentKey("local", "coder"), used_unix_ns=7),
    commit(3, 1, [9]),
]


def write(folder: Path, records: list[Record]) -> Path:
    book, _, _ = start(folder)
    for record in records:
        book.append(record)
    book.close()
    return folder / JOURNAL_NAME


def tick_until(book: Journal, clock: Clock, done: Callable[[], bool]) -> None:
    """Let the journal's thread finish; its result is taken in by a tick."""
    give_up_s = time.monotonic() + 20
    while not done():
        assert time.monotonic() < give_up_s
        clock.now_ns += GROUP_COMMIT_NS
        book.tick()


# --- reading back -----------------------------------------------------------------------------


def test_a_new_broker_finds_what_the_old_one_wrote(tmp_path: Path) -> None:
    path = write(tmp_path, HISTORY)
    assert restored(tmp_path) == fold(HISTORY)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_folder_gives_an_empty_journal_twice(tmp_path: Path) -> None:
    assert restored(tmp_path) == Restored()
    assert restored(tmp_path) == Restored()


def test_a_record_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    book, _, _ = start(tmp_path)
    for count, record in enumerate(HISTORY, 1):
        book.append(record)
        # A second reader of the same file stands for the broker after a kill -9.
        assert restored(tmp_path) == fold(HISTORY[:count])
    book.close()


def test_every_cut_of_the_file_loses_only_the_unfinished_record(tmp_path: Path) -> None:
    data = write(tmp_path, HISTORY).read_bytes()
    ends = [journal_format.HEADER_BYTES]
    for record in HISTORY:
        ends.append(ends[-1] + journal_format.FRAME_BYTES + len(encode(record)))
    for cut in range(len(data) + 1):
        (tmp_path / JOURNAL_NAME).write_bytes(data[:cut])
        whole = max(0, sum(end <= cut for end in ends) - 1)
        assert restored(tmp_path) == fold(HISTORY[:whole]), f"cut at {cut}"
        # What was cut off is gone for good: new records follow the last intact one.
        book, _, log = start(tmp_path)
        assert "journal.torn_tail" not in log.events()
        book.append(agent("late"))
        book.close()
        assert restored(tmp_path) == fold([*HISTORY[:whole], agent("late")])


def test_a_torn_tail_is_reported_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, HISTORY)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\xf5\xd6\xc7")
    _, _, log = start(tmp_path)
    level, event, fields = log.lines[0]
    assert (level, event) == ("warning", "journal.torn_tail")
    assert (fields["offset"], fields["bytes"]) == (size, 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_flipped_bit_is_refused_or_cut_and_never_believed(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / JOURNAL_NAME
    path.unlink(missing_ok=True)
    good = write(tmp_path, HISTORY).read_bytes()
    last = len(good) - journal_format.FRAME_BYTES - len(encode(HISTORY[-1]))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad)
    if at >= last:
        assert restored(tmp_path) == fold(HISTORY[:-1])
        return
    with pytest.raises(DataLoss) as caught:
        restored(tmp_path)
    assert caught.value.reason == "journal_corrupt"
    assert str(path) in caught.value.info.message
    assert "--journal-skip-corrupt" in caught.value.info.message
    assert path.read_bytes() == bytes(bad), "a refusal changes nothing"
    # Skipping gives a state that lacks something and invents nothing.
    survivors = restored(tmp_path, skip_corrupt=True)
    assert bytes(bad) in [copy.read_bytes() for copy in tmp_path.glob("*.corrupt-*")]
    assert restored(tmp_path) == survivors
    for key, state in survivors.conversations.items():
        whole = fold(HISTORY).conversations.get(key)
        transcripts = [b"", bytes(whole.transcript) if whole else b""]
        transcripts += [bytes(fold(HISTORY[:5]).conversations[KEY].transcript)]
        transcripts += [bytes(fold(HISTORY[:4]).conversations[KEY].transcript)]
        assert bytes(state.transcript) in transcripts
    for copy in tmp_path.glob("*.corrupt-*"):
        copy.unlink()


def test_a_conversation_with_a_missing_commit_starts_empty_and_keeps_its_version(
    tmp_path: Path,
) -> None:
    history: list[Record] = [agent(), commit(1, 0, [1, 2]), commit(2, 2, [3]), commit(3, 2, [4])]
    path = write(tmp_path, history)
    data = bytearray(path.read_bytes())
    # Damage the second commit: the third one's length fits all the same, its version does not.
    third = len(data) - journal_format.FRAME_BYTES - len(encode(history[3]))
    data[third - 1] ^= 1
    path.write_bytes(data)
    log = Lines()
    opened = open_journal(tmp_path, log, skip_corrupt=True)
    os.close(opened.fd)
    state = opened.restored.conversations[KEY]
    assert (state.version, bytes(state.transcript)) == (3, b"")
    assert "journal.conversation_emptied" in log.events()


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    newer = journal_format.header(journal_format.FORMAT_VERSION + 1) + b"whatever"
    path.write_bytes(newer)
    for skip in (False, True):
        with pytest.raises(FailedPrecondition) as caught:
            restored(tmp_path, skip_corrupt=skip)
        assert caught.value.reason == "journal_newer"
    assert path.read_bytes() == newer


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    path.write_text("[broker]\nmetrics_port = 0\n")
    with pytest.raises(DataLoss, match="it is no journal"):
        restored(tmp_path)
    assert path.read_text().startswith("[broker]")


def test_records_of_a_later_version_are_skipped_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path, [agent()])
    unknown = journal_format.frame(b"\x81\xa1t\xa6FUTURE")
    path.write_bytes(path.read_bytes() + unknown)
    clock = Clock()
    book, state, log = start(tmp_path, clock_ns=clock, rewrite_slack_bytes=0)
    assert list(state.agents) == [AgentKey("local", "coder")]
    assert "journal.unknown_records" in log.events()
    for version in range(1, 200):
        book.append(commit(version, 0, [1] * 50))
        clock.now_ns += GROUP_COMMIT_NS
        book.tick()
    book.close()
    assert "journal.rewritten" not in log.events()
    assert unknown in path.read_bytes()


def test_an_unusable_folder_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).mkdir()
    with pytest.raises(Unavailable) as caught:
        restored(tmp_path)
    assert caught.value.reason == "journal_unusable"


# --- writing under trouble --------------------------------------------------------------------


@contextmanager
def files_no_longer_than(most: int) -> Generator[None]:
    """This process's files stay within so many bytes: a disk that is full.

    A block, not a fixture: pytest's own output may be a file, and it writes between a test's end
    and the end of its fixtures.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_degrades_and_recovers_without_loss(tmp_path: Path) -> None:
    clock = Clock()
    book, _, log = start(tmp_path, clock_ns=clock)
    book.append(agent())
    assert book.trouble == ""
    history: list[Record] = [agent()]
    # Room for half a record: the kernel writes a part of it, then refuses.
    with files_no_longer_than(book.size_bytes + 20):
        for version in range(1, 50):
            history.append(commit(version, 2 * (version - 1), [version, 7]))
            book.append(history[-1])
        assert book.waiting == 49
        assert log.events() == ["journal.degraded"]
        assert restored(tmp_path) == fold(history[:1]), "the file stays readable meanwhile"
        clock.now_ns += RETRY_NS
        book.tick()
        assert book.trouble != ""
    due_ns = book.next_deadline_ns()
    assert due_ns is not None
    clock.now_ns = due_ns
    book.tick()
    assert book.trouble == ""
    assert log.events() == ["journal.degraded", "journal.recovered"]
    history.append(commit(99, 3, [5]))
    book.append(history[-1])
    book.close()
    assert restored(tmp_path) == fold(history)


def test_closing_on_a_full_disk_says_what_is_lost(tmp_path: Path) -> None:
    book, _, log = start(tmp_path)
    book.append(agent())
    with files_no_longer_than(book.size_bytes):
        book.append(commit(1, 0, [1]))
        book.close()
    assert log.events()[-1] == "journal.lost"
    assert restored(tmp_path) == fold([agent()])


def test_a_sync_that_fails_makes_the_file_be_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    book, _, log = start(tmp_path, clock_ns=clock)
    book.append(agent())
    real = os.fdatasync
    failing = [True]

    def fdatasync(fd: int) -> None:
        if failing:
            failing.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    book.append(commit(1, 0, [1]))
    clock.now_ns += GROUP_COMMIT_NS
    tick_until(book, clock, lambda: "journal.rewritten" in log.events())
    assert "journal.degraded" in log.events()
    clock.now_ns += RETRY_NS
    book.tick()
    assert book.trouble == ""
    book.close()
    assert restored(tmp_path) == fold([agent(), commit(1, 0, [1])])


def test_agents_are_forced_to_the_disk_and_transcripts_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    clock = Clock()
    book, _, _ = start(tmp_path, clock_ns=clock)
    book.append(agent())
    assert len(synced) == 1
    for version in range(1, 100):
        book.append(commit(version, 0, [1]))
    book.tick()
    assert len(synced) == 1
    assert book.next_deadline_ns() == GROUP_COMMIT_NS
    clock.now_ns = GROUP_COMMIT_NS
    tick_until(book, clock, lambda: book.next_deadline_ns() is None)
    assert len(synced) == 2, "ninety-nine commits, one sync"
    book.close()
    assert len(synced) == 3


# --- rewriting --------------------------------------------------------------------------------


def test_a_journal_full_of_old_news_is_rewritten_while_in_use(tmp_path: Path) -> None:
    rng = random.Random(1)
    clock = Clock()
    book, _, log = start(tmp_path, clock_ns=clock, rewrite_slack_bytes=20_000)
    history: list[Record] = [BrokerEpoch(broker_epoch=3), agent()]
    for record in history:
        book.append(record)
    length, version = 0, 0
    while log.events().count("journal.rewritten") < 3:
        version += 1
        keep = rng.randint(0, min(length, 40))
        ids = [rng.randint(0, 40_000) for _ in range(rng.randint(1, 60))]
        length = keep + len(ids)
        history.append(commit(version, keep, ids))
        book.append(history[-1])
        clock.now_ns += GROUP_COMMIT_NS // 10
        book.tick()
        assert version < 200_000
    book.close()
    assert restored(tmp_path) == fold(history)
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL_NAME]
    # How much comes while a rewrite is under way is the machine's pace; what counts is that the
    # old news is gone.
    whole = tmp_path / "whole"
    whole.mkdir()
    plain, _, _ = start(whole, clock_ns=clock, rewrite_slack_bytes=1 << 40)
    for record in history:
        plain.append(record)
    plain.close()
    assert (tmp_path / JOURNAL_NAME).stat().st_size < (whole / JOURNAL_NAME).stat().st_size // 2


def test_a_rewrite_that_finds_no_room_leaves_the_journal_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    book, _, log = start(tmp_path, clock_ns=clock, rewrite_slack_bytes=0)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_file, "write_all", full)
    history: list[Record] = [agent(), *(commit(v, 0, [v] * 20) for v in range(1, 30))]
    for record in history:
        book.append(record)
    tick_until(book, clock, lambda: "journal.rewrite_failed" in log.events())
    assert book.trouble == ""
    book.close()
    assert restored(tmp_path) == fold(history)
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL_NAME]


def test_a_crash_in_the_middle_of_a_rewrite_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path, HISTORY)
    path.with_suffix(".new").write_bytes(path.read_bytes()[:50])
    assert restored(tmp_path) == fold(HISTORY)
    assert not path.with_suffix(".new").exists()


CHILD = """
import sys
from pathlib import Path
from vram_conductor.broker.journal.journal import Journal
from vram_conductor.broker.journal.opening import open_journal
from vram_conductor.broker.journal.records import ConversationCommitted
from vram_conductor.protocol.values import ConversationKey

log = lambda level, event, /, **fields: None
book = Journal(open_journal(Path(sys.argv[1]), log), log, rewrite_slack_bytes=5_000)
version = 1
while True:
    ids = version.to_bytes(4, "little") * (version % 100 + 1)
    key = ConversationKey("local", "coder", "main")
    book.append(ConversationCommitted(conversation=key, version=version, keep=0, ids=ids))
    book.tick()
    print(version, flush=True)
    version += 1
"""


def test_kill_9_at_any_moment_loses_nothing_that_was_told(tmp_path: Path) -> None:
    write(tmp_path, [agent()])
    rng = random.Random(2)
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randint(1, 3_000))]
        child.kill()
        # A last line that was cut off tells nobody anything.
        lines += [line for line in child.stdout if line.endswith("\n")]
        child.wait()
        child.stdout.close()
        told = int(lines[-1])
        state = restored(tmp_path).conversations[KEY]
        assert state.version in (told, told + 1)
        expected = state.version.to_bytes(4, "little") * (state.version % 100 + 1)
        assert bytes(state.transcript) == expected


def test_opened_is_what_a_journal_needs(tmp_path: Path) -> None:
    opened = open_journal(tmp_path, Lines())
    assert isinstance(opened, Opened)
    assert opened.size == journal_format.HEADER_BYTES
    os.close(opened.fd)
