"""Key files and the list of keys: what is kept, for whom, and what is refused."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol import handshake
from vram_conductor.protocol.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from vram_conductor.protocol.key_files import KeyFolder, load_key, new_pair, save_key
from vram_conductor.protocol.keys import Key, KeyFile, KeyList, Quota, quotas

QUOTAS = st.builds(
    Quota,
    agents=st.none() | st.integers(0, 9),
    queued_jobs=st.none() | st.integers(0, 9),
    vram_bytes=st.none() | st.integers(0, 1 << 40),
    kv_bytes=st.none() | st.integers(0, 1 << 40),
)


def key(name: str, **fields: object) -> Key:
    given: dict[str, object] = {"principal": name, "role": "owner", **fields}
    return Key(name=name, public=new_pair().public, **given)  # type: ignore[arg-type]


def file(broker: str = "") -> KeyFile:
    pair = new_pair()
    return KeyFile(
        name="alice",
        principal="alice",
        role="owner",
        public=pair.public,
        secret=pair.secret,
        broker=broker or new_pair().public,
    )


# --- the list ---


def test_a_revoked_key_does_not_count_and_its_name_is_free() -> None:
    keys = KeyList().with_key(key("alice")).with_key(key("bob"))
    gone = keys.without("alice", "now")
    assert [each.name for each in gone.valid().values()] == ["bob"]
    assert gone.keys[0].revoked == "now"
    assert gone.without("alice", "later").keys[0].revoked == "now"
    again = gone.with_key(key("alice"))
    assert [each.name for each in again.keys] == ["bob", "alice"]
    with pytest.raises(AlreadyExists, match="key_exists"):
        again.with_key(key("alice"))
    with pytest.raises(NotFound, match="no_such_key"):
        again.without("carol", "now")


@given(QUOTAS, QUOTAS)
def test_of_several_keys_the_smallest_limit_counts(one: Quota, other: Quota) -> None:
    found = quotas(
        {each.public: each for each in (key("a", principal="p", quota=one), key("b", quota=other))}
    )
    assert found.get("p", Quota()) == one
    both = one.tightest(other)
    assert both == other.tightest(one)
    for name in Quota.__struct_fields__:
        values = [getattr(each, name) for each in (one, other)]
        known = [value for value in values if value is not None]
        assert getattr(both, name) == (min(known) if known else None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a/b"},
        {"name": ""},
        {"principal": "$x"},
        {"public": "short"},
        {"public": "~" * 40},
        {"role": "root"},
        {"devices": ["cpu"]},
        {"role": "worker", "devices": ["a b"]},
        {"role": "worker", "devices": "cpu"},
        {"quota": {"agents": -1}},
        {"quota": {"agants": 1}},
        {"more": 1},
    ],
)
def test_a_malformed_key_is_refused(wrong: dict[str, object]) -> None:
    right = msgspec.to_builtins(key("alice"))
    assert msgspec.convert(right, Key).name == "alice"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**right, **wrong}, Key)


def test_two_keys_of_one_name_or_half_are_refused() -> None:
    one = msgspec.to_builtins(key("alice"))
    for other in ({**one, "name": "bob"}, {**one, "public": new_pair().public}):
        with pytest.raises(msgspec.ValidationError, match="two keys"):
            msgspec.convert({"keys": [one, other]}, KeyList)


def test_a_secret_is_not_in_a_repr() -> None:
    mine = file()
    assert mine.secret not in repr(mine)
    pair = new_pair()
    assert pair.secret not in f"{pair} {pair!r}"


# --- files ---


def test_a_key_file_comes_back_and_is_its_owners_only(tmp_path: Path) -> None:
    path, mine = tmp_path / "alice.key", file()
    save_key(path, mine)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(path) == mine
    with pytest.raises(AlreadyExists, match="key_file_exists"):
        save_key(path, file())
    assert load_key(path) == mine
    with pytest.raises(Unavailable, match="keys_unusable"):
        save_key(tmp_path / "nowhere" / "alice.key", mine)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "alice.key"
    save_key(path, file())
    path.chmod(mode)
    with pytest.raises(FailedPrecondition, match="unsafe_key_file"):
        load_key(path)


def test_what_is_no_key_file_is_refused_without_its_content(tmp_path: Path) -> None:
    path, mine = tmp_path / "alice.key", file()
    text = msgspec.json.encode(mine)
    swapped = msgspec.structs.replace(mine, secret=new_pair().secret)
    for wrong in (b"", b"{", text[:-9], text.replace(b"secret", b"sacred")):
        path.write_bytes(wrong)
        path.chmod(0o600)
        with pytest.raises(InvalidArgument, match="bad_key_file") as caught:
            load_key(path)
        assert mine.secret not in str(caught.value)
    path.write_bytes(msgspec.json.encode(swapped))
    with pytest.raises(InvalidArgument, match="do not belong together"):
        load_key(path)
    with pytest.raises(NotFound, match="no_key_file"):
        load_key(tmp_path / "none.key")
    with pytest.raises(FailedPrecondition, match="unsafe_key_file"):
        load_key(tmp_path)


def test_a_folder_is_made_private_and_keeps_its_key(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    assert not folder.exists
    pair = folder.prepare()
    assert folder.exists
    assert folder.prepare() == pair
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for each in folder.path.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600, each
    before = folder.stamp()
    folder.add(key("alice"))
    assert folder.stamp() != before
    assert pair.secret not in folder.list_path.read_text()
    folder.revoke("alice", "now")
    assert folder.read().valid() == {}


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.prepare()
    names = [f"k{number}" for number in range(20)]
    threads = [
        threading.Thread(target=lambda name=name: KeyFolder(folder.path).add(key(name)))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.name for each in folder.read().keys) == sorted(names)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.prepare()
    folder.path.chmod(0o750)
    for refused in (folder.read, folder.prepare):
        with pytest.raises(FailedPrecondition, match="unsafe_directory"):
            refused()


# --- handshakes ---


def test_what_a_monitor_says_of_a_handshake() -> None:
    mine = file()
    where = "tcp://h:1"
    judged = {
        (0x4000, 400): "key_refused",
        (0x2000, 0x11000002): "key_unwanted",
        (0x2000, 0x11000001): "wrong_broker_key",
        (0x0800, 32): "wrong_broker_key",
        (0x1000, 0): None,
        (0x0200, 5): None,
    }
    for (event, value), reason in judged.items():
        failure = handshake.judge(event, value, where, mine)
        assert (failure.error.reason if failure else None) == reason
        assert failure is None or failure.final == (reason != "wrong_broker_key")
    bare = handshake.judge(0x2000, 0x11000002, where, None)
    assert bare is not None
    assert bare.error.reason == "key_required"
    assert handshake.judge(0x0800, 32, where, None) is None
