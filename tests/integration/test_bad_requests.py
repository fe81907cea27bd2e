"""Requests that cannot be granted, on the real path: what they are told, and that nobody else
notices."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgpack
import pytest
from gguf_models import Spec, make_model
from scene import CHATTY, SMOL, Scene, model, refusal, some_tokens

from vram_conductor.protocol.errors import LEDGER_DENY, Code, ErrorInfo
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.limits import PREAMBLE
from vram_conductor.protocol.messages import Error

# --- REGISTER: the file -----------------------------------------------------------------------


def architecture(path: Path, name: str) -> None:
    """A GGUF with nothing in it but the name of its architecture."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_tokenizer_model("no_vocab")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_file(path: Path, how: str) -> None:
    whole = make_model(Spec(vocab="bytes")).read_bytes()
    match how:
        case "nothing":
            pass
        case "a folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "text":
            path.write_text("not a model at all\n" * 100)
        case "an archive":
            path.write_bytes(b"PK\x03\x04" + whole[4:])
        case "cut in the header":
            path.write_bytes(whole[:300])
        case "cut in the tensors":
            path.write_bytes(whole[:-5000])
        case "corrupt":
            path.write_bytes(whole[:24] + bytes(range(256)) * 30)
        case "impossible counts":
            path.write_bytes(whole[:8] + struct.pack("<QQ", 1 << 40, 1 << 40) + whole[24:])
        case "unknown architecture":
            architecture(path, "hal9000")
        case "crashes llama.cpp":
            path.write_bytes(make_model(Spec(arch="jamba", ssm_inner=192)).read_bytes())
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "code", "reason", "says"),
    [
        ("nothing", Code.NOT_FOUND, "no_such_model", "conductor models"),
        ("a folder", Code.INVALID_ARGUMENT, "not_a_file", "GGUF"),
        ("empty", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("text", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("an archive", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("cut in the header", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("cut in the tensors", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("corrupt", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("impossible counts", Code.INVALID_ARGUMENT, "bad_model", "again"),
        ("unknown architecture", Code.UNIMPLEMENTED, "unsupported_model", "hal9000"),
        ("crashes llama.cpp", Code.INVALID_ARGUMENT, "bad_model", "again"),
    ],
)
def test_files_that_are_no_model(
    scene: Scene, tmp_path: Path, how: str, code: Code, reason: str, says: str
) -> None:
    path = tmp_path / "file.gguf"
    write_file(path, how)
    with scene.undisturbed():
        error = refusal(lambda: scene.conductor.register("new", str(path), n_ctx=256))
        assert (error.code, error.reason, error.retryable) == (code, reason, False)
        assert says in error.message
    # The same name and place are free for a model that is one.
    if path.is_dir():
        path.rmdir()
    path.write_bytes(make_model(Spec(vocab="bytes")).read_bytes())
    assert scene.conductor.register("new", str(path), n_ctx=256).info is not None
    assert scene.run("new", some_tokens(5, 3), max_tokens=3).ids


def test_unknown_models_and_agents(scene: Scene) -> None:
    conductor = scene.conductor
    with scene.undisturbed():
        error = refusal(lambda: conductor.register("new", "smolm2-135"))
        assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_model")
        assert SMOL in error.message, "it names what was probably meant"
        asks: list[Callable[[], object]] = [
            lambda: scene.run("nobody", "Hello"),
            lambda: conductor.reset("nobody"),
            lambda: conductor.unregister("nobody"),
        ]
        for ask in asks:
            error = refusal(ask)
            assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_agent")
        error = refusal(lambda: conductor.register("new", model(), device="cuda:7"))
        assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_device")
        assert "cpu" in error.message


# --- REGISTER: numbers ------------------------------------------------------------------------


def answer(scene: Scene, kind: str, **fields: Any) -> ErrorInfo:
    """What a client without our library is told."""
    client, rid = scene.raw(), new_rid()
    client.socket.send_multipart([PREAMBLE, msgpack.packb({"t": kind, "rid": rid, **fields})])
    error = client.expect(Error, rid)
    return error.error


@pytest.mark.parametrize("n_ctx", [0, -1, -(2**40)])
def test_contexts_below_one(scene: Scene, n_ctx: int) -> None:
    with scene.undisturbed():
        theirs = answer(scene, "REGISTER", agent="new", model=model(), n_ctx=n_ctx)
        ours = refusal(lambda: scene.conductor.register("new", model(), n_ctx=n_ctx))
        for error in (theirs, ours):
            assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "bad_value")
            assert error.details["field"] == "n_ctx"
            assert str(n_ctx) in error.message


def test_contexts_beyond_training(scene: Scene) -> None:
    with scene.undisturbed():
        error = refusal(lambda: scene.conductor.register("new", SMOL, n_ctx=8193))
        assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "n_ctx_beyond_training")
        assert error.details == {"n_ctx": 8193, "n_ctx_train": 8192}
        assert "8192" in error.message
        error = refusal(lambda: scene.conductor.register("new", SMOL, n_ctx=2**40))
        assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "limit_exceeded")


def test_a_taken_name_with_other_parameters(scene: Scene) -> None:
    scene.conductor.register("taken", model(), n_ctx=512)
    scene.conductor.register("taken", model(), n_ctx=512)
    with scene.undisturbed():
        error = refusal(lambda: scene.conductor.register("taken", model(CHATTY), n_ctx=768))
        assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "agent_exists")
        assert error.details["differences"] == {
            "model": [model(), model(CHATTY)],
            "n_ctx": [512, 768],
        }
        assert "another name" in error.message


# --- DECODE -----------------------------------------------------------------------------------


def talk(scene: Scene, agent: str, n_ctx: int) -> None:
    """An agent with a conversation that has begun."""
    scene.conductor.register(agent, model(CHATTY), n_ctx=n_ctx, temperature=0)
    scene.run(agent, some_tokens(40, 4), max_tokens=8)


def test_prompts_longer_than_the_context(scene: Scene) -> None:
    talk(scene, "short", 256)
    with scene.undisturbed():
        error = refusal(lambda: scene.run("short", some_tokens(300, 5)))
        assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "prompt_too_long")
        # The record has the last answer's token, too: nothing is dropped to make it fit.
        assert error.details == {"prompt_tokens": 348, "n_ctx": 256}
        assert "larger n_ctx" in error.message
        error = refusal(lambda: scene.run("short", some_tokens(256, 5), continue_=False))
        assert error.details == {"prompt_tokens": 256, "n_ctx": 256}
    found = scene.run("short", some_tokens(3, 6), max_tokens=4)
    assert found.usage.prompt_tokens == 51
    assert found.usage.reprefilled_tokens == 0


def test_empty_prompts(scene: Scene) -> None:
    talk(scene, "empty", 256)
    decode = scene.conductor.decode
    with scene.undisturbed():
        asks: list[Callable[[], object]] = [
            lambda: decode("empty", prompt="").result(),
            lambda: decode("empty", tokens=[]).result(),
            lambda: decode("empty", messages=[]).result(),
            lambda: decode("empty").result(),
            lambda: decode("empty", prompt="a", tokens=[300]).result(),
        ]
        for ask in asks:
            error = refusal(ask)
            assert error.code == Code.INVALID_ARGUMENT
            assert error.reason in ("empty_input", "empty_prompt", "bad_input")
        empty: list[dict[str, Any]] = [{"prompt": ""}, {"tokens": []}, {"messages": []}, {}]
        for fields in empty:
            error = answer(scene, "DECODE", agent="empty", **fields)
            assert error.code == Code.INVALID_ARGUMENT
            assert error.reason in ("empty_input", "empty_prompt", "bad_input")
    assert scene.agent("empty").conversations[0].version == 1


def test_text_that_is_not_unicode(scene: Scene) -> None:
    talk(scene, "unicode", 256)
    with scene.undisturbed():
        client, rid = scene.raw(), new_rid()
        fields = {"t": "DECODE", "rid": rid, "agent": "unicode", "prompt": "PROMPT"}
        body = msgpack.packb(fields)
        for damage in (b"PR\xffMPT", b"PR\xed\xa0\x80T", b"PROMP\xc3"):
            broken = body.replace(b"PROMPT", damage)
            assert len(broken) == len(body)
            client.socket.send_multipart([PREAMBLE, broken])
            error = client.expect(Error)
            assert (error.error.code, error.error.reason) == (
                Code.INVALID_ARGUMENT,
                "bad_message",
            )
            assert error.rid == rid
        mine = refusal(lambda: scene.run("unicode", "half a pair: \ud83d"))
        assert mine.code == Code.INVALID_ARGUMENT


def test_messages_to_a_model_without_a_template(scene: Scene) -> None:
    scene.conductor.register("raw", model(), n_ctx=256, temperature=0)
    with scene.undisturbed():
        error = refusal(lambda: scene.conductor.agent("raw").chat("hello").result())
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "no_chat_template")
        assert "prompt" in error.message
    assert scene.run("raw", "hello", max_tokens=2).ids


def test_tokens_outside_of_the_vocabulary(scene: Scene) -> None:
    talk(scene, "tokens", 256)
    with scene.undisturbed():
        for ids in ([320], [5, 2**31 - 1]):
            error = refusal(lambda ids=ids: scene.run("tokens", ids))  # type: ignore[misc]
            assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "bad_tokens")
            assert "320" in error.message
        error = refusal(lambda: scene.run("tokens", [-1]))
        assert error.code == Code.INVALID_ARGUMENT
        error = refusal(lambda: scene.run("tokens", [300], logit_bias={320: 1.0}))
        assert error.code == Code.INVALID_ARGUMENT


def test_a_version_that_has_passed(scene: Scene) -> None:
    talk(scene, "version", 256)
    with scene.undisturbed():
        error = refusal(lambda: scene.run("version", [300], expect_version=7))
        assert (error.code, error.reason) == (Code.ABORTED, "version_mismatch")
    assert scene.run("version", [300], expect_version=1, max_tokens=1).usage.state_version == 2


# --- LEASE ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"bytes": 0}, Code.INVALID_ARGUMENT, "bad_value"),
        ({"bytes": -1}, Code.INVALID_ARGUMENT, "bad_value"),
        ({"bytes": 1 << 62}, Code.OUT_OF_RANGE, LEDGER_DENY),
        ({"bytes": (1 << 63) - 1}, Code.OUT_OF_RANGE, "limit_exceeded"),
        ({"bytes": (1 << 64) - 1}, Code.OUT_OF_RANGE, "limit_exceeded"),
        ({"bytes": 1e9}, Code.INVALID_ARGUMENT, "bad_message"),
        ({"bytes": float("nan")}, Code.INVALID_ARGUMENT, "bad_message"),
        ({"bytes": "3 GB"}, Code.INVALID_ARGUMENT, "bad_message"),
        ({"ttl_s": 0}, Code.INVALID_ARGUMENT, "bad_value"),
        ({"ttl_s": -60}, Code.INVALID_ARGUMENT, "bad_value"),
        ({"ttl_s": float("nan")}, Code.INVALID_ARGUMENT, "bad_message"),
        ({"ttl_s": float("inf")}, Code.INVALID_ARGUMENT, "bad_message"),
        ({"ttl_s": 1 << 40}, Code.OUT_OF_RANGE, "limit_exceeded"),
        ({"name": "../train"}, Code.INVALID_ARGUMENT, "bad_name"),
        ({"name": "local/train"}, Code.INVALID_ARGUMENT, "bad_name"),
        ({"name": "x" * 65}, Code.OUT_OF_RANGE, "limit_exceeded"),
        ({"device": "cuda:99"}, Code.NOT_FOUND, "no_such_device"),
        ({"release": True}, Code.NOT_FOUND, "no_such_lease"),
        ({"park": 1}, Code.INVALID_ARGUMENT, "bad_message"),
    ],
)
def test_leases_that_make_no_sense(
    fields: dict[str, Any], code: Code, reason: str, scene: Scene
) -> None:
    client = scene.raw()
    before = scene.calm_books()
    whole = {"t": "LEASE", "rid": new_rid(), "name": "train", "bytes": 1000, **fields}
    client.socket.send_multipart([PREAMBLE, msgpack.packb(whole)])
    error = client.expect(Error).error
    assert (error.code, error.reason) == (code, reason)
    assert scene.device().leases == []
    assert scene.books() == before


def test_nonsense_leases_disturb_nobody(scene: Scene) -> None:
    with scene.undisturbed():
        client = scene.raw()
        for size in (0, -1, 1 << 62, float("nan")):
            whole = {"t": "LEASE", "rid": new_rid(), "name": "train", "bytes": size}
            client.socket.send_multipart([PREAMBLE, msgpack.packb(whole)])
            client.expect(Error)
