"""Compiling the preload library, finding out whether it can be used, starting with it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vmm_rig import PATIENCE_S, Rig, compile_c, stub_rig

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker import __main__ as worker_main
from vram_conductor.worker.vmm import build, preload
from vram_conductor.worker.vmm.library import ABI, Vmm


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return stub_rig(tmp_path_factory.mktemp("preload"))


@pytest.fixture
def env(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of somebody whose cache is empty and who has no virtual environment."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "LD_PRELOAD")}
    return {**kept, "XDG_CACHE_HOME": str(short_tmp / "cache")}


def with_llama(env: dict[str, str], folder: Path, contents: bytes) -> dict[str, str]:
    """With a llama.cpp whose CUDA part holds ``contents``."""
    folder.mkdir(exist_ok=True)
    (folder / "libggml-cuda.so.0").write_bytes(contents)
    return {**env, "LLAMA_CPP_LIB_PATH": str(folder)}


SHARED_RUNTIME = b"\x7fELF\0libcudart.so.13\0cudaMalloc\0"


# --- compiling --------------------------------------------------------------------------------


def test_it_is_compiled_once(env: dict[str, str], short_tmp: Path) -> None:
    build.compiler(env)  # skips nothing: where tests run, llama.cpp was compiled
    assert build.compiled(env) is None
    path = build.build(env)
    assert path.parent == short_tmp / "cache" / "vram-conductor" / "vmm"
    assert [item.name for item in path.parent.iterdir()] == [path.name], "nothing half-done is left"
    made = path.stat().st_mtime_ns
    assert build.build({**env, "CC": "false"}) == path
    assert path.stat().st_mtime_ns == made
    assert preload.trial(path, env, driver=False) == ""


def test_a_virtual_environment_holds_it(
    env: dict[str, str], short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(short_tmp / "venv"))
    assert build.build(env).is_relative_to(short_tmp / "venv" / "lib")


def test_a_read_only_environment_does_not_stop_it(
    env: dict[str, str], short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short_tmp / "venv").touch()  # root may write everywhere but below a file
    monkeypatch.setattr(sys, "prefix", str(short_tmp / "venv"))
    assert build.build(env).is_relative_to(short_tmp / "cache")
    (short_tmp / "file").touch()
    with pytest.raises(FailedPrecondition, match="cannot be written") as caught:
        build.build({**env, "XDG_CACHE_HOME": str(short_tmp / "file")})
    assert caught.value.reason == "compile_failed"


@pytest.mark.parametrize("sign", [" ", ":"])
def test_a_path_that_cannot_be_preloaded_is_not_used(
    env: dict[str, str], short_tmp: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    odd = str(short_tmp / f"my{sign}folder")
    monkeypatch.setattr(sys, "prefix", odd)
    assert build.build(env).is_relative_to(short_tmp / "cache")
    with pytest.raises(FailedPrecondition, match="a space or a colon"):
        build.build({**env, "XDG_CACHE_HOME": odd})


@pytest.mark.parametrize("what", ["source", "libc", "machine"])
def test_another_source_or_machine_has_another_library(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = build.file_name()
    assert before == build.file_name()
    if what == "source":
        other = short_tmp / "vmm.c"
        other.write_bytes(build.SOURCES[0].read_bytes() + b"\n")
        monkeypatch.setattr(build, "SOURCES", (other, *build.SOURCES[1:]))
    elif what == "libc":
        monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    else:
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert build.file_name() != before


def test_no_compiler(env: dict[str, str], short_tmp: Path) -> None:
    for more, name in (({}, "cc, gcc, clang"), ({"CC": "my-cc -m64"}, "my-cc")):
        with pytest.raises(FailedPrecondition, match="apt-get install gcc") as caught:
            build.build({**env, "PATH": str(short_tmp), **more})
        assert caught.value.reason == "no_compiler"
        assert f"({name})" in caught.value.info.message


def test_a_compiler_that_fails_is_quoted(env: dict[str, str], short_tmp: Path) -> None:
    broken = short_tmp / "cc"
    broken.write_text(
        "#!/bin/sh\necho 'note' >&2\necho 'vmm.c:1: error: no stdint.h' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    with pytest.raises(FailedPrecondition, match=r"vmm\.c:1: error: no stdint\.h") as caught:
        build.build({**env, "CC": str(broken)})
    assert caught.value.reason == "compile_failed"
    assert build.compiled(env) is None


def test_a_compiler_may_have_arguments(env: dict[str, str]) -> None:
    command = " ".join([*build.compiler(env), "-g"])
    assert build.build({**env, "CC": command}).exists()


def test_the_command(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "vram_conductor.worker.vmm.build"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).exists()
    monkeypatch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
    monkeypatch.setenv("CC", "no-such-cc")
    assert build.main() == 1
    assert "no-such-cc" in capsys.readouterr().err


# --- whether it can be used --------------------------------------------------------------------


def test_what_llama_cpp_has_to_be(env: dict[str, str], short_tmp: Path) -> None:
    llama = short_tmp / "llama"
    assert preload.unfit_llama(None).endswith(
        "not installed; in a clone of the project: make setup"
    )
    assert "without CUDA" in preload.unfit_llama(short_tmp)
    assert preload.unfit_llama(short_tmp).endswith("CMAKE_ARGS=-DGGML_CUDA=on make setup")
    static = with_llama(env, llama, b"\x7fELF\0libcuda.so.1\0cudaMalloc\0")
    assert "static" in preload.find(static).why
    assert not preload.find(static).path
    shared = with_llama(env, llama, SHARED_RUNTIME)
    assert preload.find(shared) == preload.Finding(path=str(build.compiled(env)))


def test_without_a_compiler_the_reason_says_how_to_get_one(
    env: dict[str, str], short_tmp: Path
) -> None:
    shared = with_llama(env, short_tmp / "llama", SHARED_RUNTIME)
    assert "apt-get install gcc" in preload.find({**shared, "CC": "no-such-cc"}).why


def other_machine(library: Path, target: Path) -> None:
    """The same, but its header names another processor."""
    data = bytearray(library.read_bytes())
    risc_v, aarch64 = b"\xf3\x00", b"\xb7\x00"
    data[18:20] = risc_v if bytes(data[18:20]) != risc_v else aarch64
    target.write_bytes(data)


def other_libc(library: Path, target: Path) -> None:
    """One that needs a C library that is not here."""
    source, musl = target.with_name("x.c"), target.with_name("libc.musl-any.so.1")
    source.write_text("int vmm_abi(void) { return 1; }\n")
    compile_c([source], musl, "-Wl,-soname,libc.musl-any.so.1")
    compile_c([source], target, "-Wl,--no-as-needed", str(musl))
    musl.unlink()


def no_library(library: Path, target: Path) -> None:
    target.write_text("not a library\n")


def a_stranger(library: Path, target: Path) -> None:
    source = target.with_name("x.c")
    source.write_text("int something_else(void) { return 1; }\n")
    compile_c([source], target)


@pytest.mark.parametrize("make", [other_machine, other_libc, no_library, a_stranger])
def test_one_that_the_loader_does_not_take(
    rig: Rig, env: dict[str, str], short_tmp: Path, make: Callable[[Path, Path], None]
) -> None:
    path = short_tmp / "vmm.so"
    make(rig.vmm, path)
    why = preload.trial(path, env, driver=False)
    if make is a_stranger:
        assert "vmm_abi" in why
    else:
        assert why.startswith(str(path))
        assert "cannot be preloaded" in why
        assert "compiled again" in why


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({}, ""),
        ({"STUB_UNABLE": "1"}, "no virtual memory management"),
        ({"STUB_NO_DEVICE": "1"}, "shows no GPU"),
        ({"VRAM_CONDUCTOR_LIBCUDA": "/nowhere/libcuda.so.1"}, "no NVIDIA driver here"),
        # A library that is no driver stands for one that lacks what is needed.
        ({"VRAM_CONDUCTOR_LIBCUDA": "LD_PRELOAD"}, "too old: it has no cuInit"),
    ],
)
def test_what_the_driver_says(
    rig: Rig, env: dict[str, str], fault: dict[str, str], text: str
) -> None:
    fault = {name: rig.env.get(value, value) for name, value in fault.items()}
    stub = {name: value for name, value in rig.env.items() if name != "LD_PRELOAD"}
    why = preload.trial(rig.vmm, {**env, **stub, **fault}, driver=True)
    assert text in why
    assert bool(why) == bool(text)


# --- starting with it --------------------------------------------------------------------------

_ENTER = """\
import json, os, subprocess, sys
from vram_conductor.worker.vmm import preload
first = os.environ.get(preload.MARK) is None
preload.enter(sys.argv[1], sys.argv[2], sys.orig_argv[1:], os.environ)
child = [sys.executable, "-c", "import os; print(os.environ.get('LD_PRELOAD', ''))"]
print(json.dumps({
    "again": not first, "loaded": preload.loaded(), "why": preload.reason(), "pid": os.getpid(),
    "mark": preload.MARK in os.environ, "argv": sys.argv[1:],
    "child": subprocess.run(child, capture_output=True, text=True).stdout.strip(),
}))
"""


def enter(env: dict[str, str], *arguments: str) -> dict[str, object]:
    with subprocess.Popen(
        [sys.executable, "-c", _ENTER, *arguments], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        said: dict[str, object] = json.loads(out)
        assert said["pid"] == process.pid, "supervised, waited for and killed as before"
        return said


@pytest.fixture
def gpu_env(env: dict[str, str], short_tmp: Path) -> dict[str, str]:
    return with_llama(env, short_tmp / "llama", SHARED_RUNTIME)


def test_a_cuda_worker_begins_again_with_it(gpu_env: dict[str, str]) -> None:
    said = enter(gpu_env, "cuda", "auto", "--flag", "a b")
    assert said["again"]
    assert said["loaded"]
    assert said["argv"] == ["cuda", "auto", "--flag", "a b"]
    assert (said["why"], said["mark"], said["child"]) == ("", False, "")


def test_what_the_user_preloads_stays(rig: Rig, gpu_env: dict[str, str], short_tmp: Path) -> None:
    a_stranger(rig.vmm, short_tmp / "own.so")
    own = str(short_tmp / "own.so")
    said = enter({**gpu_env, "LD_PRELOAD": own}, "cuda", "auto")
    assert said["loaded"]
    assert said["child"] == own, "and is what the worker's own children get"


@pytest.mark.parametrize(
    ("kind", "sleep", "text"), [("cpu", "auto", "cuda device"), ("cuda", "off", "switched off")]
)
def test_where_nothing_sleeps_it_goes_on_without(
    gpu_env: dict[str, str], kind: str, sleep: str, text: str
) -> None:
    said = enter(gpu_env, kind, sleep)
    assert not said["again"]
    assert not said["loaded"]
    assert text in str(said["why"])


def test_where_it_cannot_be_used_it_goes_on_and_knows_why(gpu_env: dict[str, str]) -> None:
    (Path(gpu_env["LLAMA_CPP_LIB_PATH"]) / "libggml-cuda.so.0").unlink()
    said = enter(gpu_env, "cuda", "auto")
    assert not said["again"]
    assert not said["loaded"]
    assert "without CUDA" in str(said["why"])


def test_a_loader_that_refuses_it_after_all_is_not_asked_for_ever(gpu_env: dict[str, str]) -> None:
    said = enter({**gpu_env, preload.MARK: ""}, "cuda", "auto")
    assert not said["loaded"]
    assert "did not take" in str(said["why"])


def test_the_worker_asks_with_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vram_conductor.worker import app

    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(app, "main", lambda: 7)
    monkeypatch.setattr(preload, "enter", lambda kind, sleep, *_: asked.append((kind, sleep)))
    for flags in (
        ["--device", "cuda:1"],
        ["--device", "cuda", "--sleep", "off"],
        ["--device", "?"],
    ):
        monkeypatch.setattr(sys, "argv", ["worker", *flags])
        monkeypatch.delenv("VRAM_CONDUCTOR_CONFIG", raising=False)
        assert worker_main.begin() == 7
    assert asked == [("cuda", "auto"), ("cuda", "off")], "what is wrong is main's to say"


def test_a_process_without_it_says_so() -> None:
    with pytest.raises(FailedPrecondition, match="conductor worker") as caught:
        Vmm.open()
    assert caught.value.reason == "vmm_unavailable"


def test_one_of_another_version_is_refused(rig: Rig) -> None:
    said = rig.run("vmm_open", "1")
    assert f"has interface {ABI}, {ABI + 1} is wanted" in said


def test_a_driver_that_cannot_is_the_reason(rig: Rig) -> None:
    assert "no virtual memory management" in rig.run("vmm_open", "0", STUB_UNABLE="1")
