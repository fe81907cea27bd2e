"""Golden vectors: our codec and an independent msgpack agree on every byte of them."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from vram_conductor.protocol import commands, messages, validate
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.plain import is_array
from vram_conductor.protocol.vectors import __main__ as command
from vram_conductor.protocol.vectors.vector import CODECS, unplain

FOLDER = Path(command.FOLDER)


def load(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((FOLDER / name).read_text("utf-8"))["vectors"]
    return entries


MAP16 = 0xDE
VALID = load("client.json") + load("worker.json")
INVALID = load("invalid.json")


def frames_of(entry: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in entry["frames_hex"]]


def by_name(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[entry["name"] for entry in entries])


def without_header(body: bytes) -> bytes:
    """The map without its size: msgspec writes map16 for a type with many fields even when few
    of them are set, and every reader understands both."""
    return body[3:] if body[0] == MAP16 else body[1:]


@by_name(VALID)
def test_valid_decodes_with_our_codec(entry: dict[str, Any]) -> None:
    frames = frames_of(entry)
    codec = CODECS[entry["direction"]]
    message, raw = codec.decode(frames)
    if entry["direction"] == "client_to_broker":
        validate.check(message)
    assert raw == frames[2:]
    again = codec.encode(message, raw)
    assert codec.decode(again) == (message, raw)
    assert (again == frames) is entry["canonical"]


@by_name(VALID)
def test_valid_decodes_with_an_independent_msgpack(entry: dict[str, Any]) -> None:
    value = msgpack.unpackb(frames_of(entry)[1])
    if entry["json"] is None:
        assert not entry["canonical"], "only an extension type has no form in JSON"
    else:
        assert value == unplain(entry["json"])
    assert value["t"] in TYPES[entry["direction"]]


@by_name([entry for entry in VALID if entry["canonical"]])
def test_valid_encodes_to_the_same_bytes_everywhere(entry: dict[str, Any]) -> None:
    value = unplain(entry["json"])
    body = frames_of(entry)[1]
    assert without_header(msgpack.packb(value)) == without_header(body)
    assert without_header(msgspec.msgpack.encode(value)) == without_header(body)


def receive(entry: dict[str, Any]) -> None:
    message, _ = CODECS[entry["direction"]].decode(frames_of(entry))
    validate.check(message)


@by_name(INVALID)
def test_invalid_is_refused_with_the_stated_error(entry: dict[str, Any]) -> None:
    with pytest.raises(ConductorError) as caught:
        receive(entry)
    assert caught.value.info.code == entry["error_code"]
    assert caught.value.reason == entry["reason"]


@by_name([entry for entry in INVALID if entry["json"] is not None])
def test_invalid_is_what_it_says_for_an_independent_msgpack(entry: dict[str, Any]) -> None:
    body = frames_of(entry)[1]
    value = msgpack.unpackb(body, strict_map_key=False)
    shown = unplain(entry["json"])
    assert repr(value) == repr(shown), "repr, because NaN is not equal to itself"


def tags(union: Any) -> set[str]:
    return {str(kind.__struct_config__.tag) for kind in get_args(union)}


TYPES = {
    "client_to_broker": tags(messages.ClientMessage),
    "broker_to_client": tags(messages.BrokerMessage),
    "broker_to_worker": tags(commands.ToWorker),
    "worker_to_broker": tags(commands.FromWorker),
}


@pytest.mark.parametrize("direction", TYPES)
def test_every_message_type_has_vectors(direction: str) -> None:
    seen = {
        entry["json"]["t"] for entry in VALID if entry["direction"] == direction and entry["json"]
    }
    assert seen == TYPES[direction]


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        for field in value.__struct_fields__:
            yield from structs_in(getattr(value, field))
    elif is_array(value):
        for item in value:
            yield from structs_in(item)


def test_every_field_is_seen_away_from_its_default() -> None:
    """In messages and in the values inside of them: what is never sent is never tested."""
    seen: dict[type[msgspec.Struct], set[str]] = {}
    for entry in VALID:
        message, _ = CODECS[entry["direction"]].decode(frames_of(entry))
        for value in structs_in(message):
            used = seen.setdefault(type(value), set())
            for field in msgspec.structs.fields(value):
                default = field.default
                if field.default_factory is not msgspec.NODEFAULT:
                    default = field.default_factory()
                if getattr(value, field.name) != default:
                    used.add(field.name)
    # ``overflow`` has no second value that this version would accept.
    unseen = {
        f"{kind.__name__}.{name}"
        for kind, used in seen.items()
        for name in set(kind.__struct_fields__) - used - {"overflow"}
    }
    assert not unseen, f"no vector shows {sorted(unseen)}"


def test_names_are_unique() -> None:
    for name in ("client.json", "worker.json", "invalid.json"):
        names = [entry["name"] for entry in load(name)]
        assert len(names) == len(set(names))


def test_the_files_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr().err


def test_check_finds_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--folder", str(tmp_path)]) == 0
    assert command.main(["--check", "--folder", str(tmp_path)]) == 0
    client = tmp_path / "client.json"
    client.write_text(client.read_text("utf-8").replace("HELLO", "HALLO"), "utf-8")
    (tmp_path / "worker.json").unlink()
    assert command.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "client.json, worker.json" in capsys.readouterr().err


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no Node.js here to read the vectors with")
def test_another_language_reads_the_same_values(tmp_path: Path) -> None:
    def read(folder: Path) -> subprocess.CompletedProcess[str]:
        reader = Path(__file__).with_name("vectors.mjs")
        command = [str(NODE), str(reader), str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = read(FOLDER)
    assert done.returncode == 0, done.stderr
    readable = [entry for entry in VALID if entry["json"] is not None]
    assert done.stdout == f"{len(readable)} vectors\n"
    for name in ("client.json", "worker.json"):
        text = (FOLDER / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace('"coder"', '"coder2"'), "utf-8")
    assert read(tmp_path).returncode == 1
