"""``scripts/setup.py``: what it shows of pip's and the compiler's output, and when it builds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("build_log"), importlib.import_module("setup")
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in ("build_log", "setup"):
            sys.modules.pop(name, None)


# As pip and ninja write them.
LOG = """\
Using pip 23.2.1 from /x/.venv/lib/python3.11/site-packages/pip (python 3.11)
Collecting llama-cpp-python==0.3.36
  Downloading llama_cpp_python-0.3.36.tar.gz (68.4 MB)
  Running command pip subprocess to install build dependencies
  Collecting scikit-build-core[pyproject]>=0.9.2
    Downloading scikit_build_core-0.11.5-py3-none-any.whl.metadata (21 kB)
  Installing build dependencies: started
  Installing build dependencies: finished with status 'done'
Building wheels for collected packages: llama-cpp-python
  Building wheel for llama-cpp-python (pyproject.toml): started
  *** Configuring CMake...
  loading initial cache file /tmp/tmpx/build/CMakeInit.txt
  -- The C compiler identification is GNU 12.2.0
  [1/112] Building CXX object vendor/llama.cpp/common/CMakeFiles/build_info.dir/build-info.cpp.o
  [2/112] Building C object vendor/llama.cpp/ggml/src/CMakeFiles/ggml-base.dir/ggml.c.o
  [112/112] Install the project...
Installing collected packages: typing-extensions, numpy, llama-cpp-python
Successfully installed llama-cpp-python-0.3.36
"""


def test_a_recorded_log(modules: tuple[ModuleType, ModuleType]) -> None:
    log, _ = modules
    news = [item for line in LOG.splitlines() if (item := log.read(line)) is not None]
    assert news == [
        log.Doing("resolving llama-cpp-python==0.3.36"),
        log.Doing("downloading llama_cpp_python-0.3.36 (68.4 MB)", large=True),
        log.Doing("resolving scikit-build-core[pyproject]>=0.9.2"),
        log.Doing("downloading scikit_build_core-0.11.5 (21 kB)"),
        log.Doing("fetching the build's own tools"),
        log.Doing("fetching the build's own tools"),
        log.Doing("building llama-cpp-python"),
        log.Step(1, 112),
        log.Step(2, 112),
        log.Step(112, 112),
        log.Doing("installing 3 packages", large=True),
    ]


@pytest.mark.parametrize(
    ("line", "done", "total"),
    [
        ("[ 12%] Building CXX object x.o", 12, 100),
        ("  [100%] Built target llama", 100, 100),
        ("[7/9] Linking", 7, 9),
    ],
)
def test_steps(modules: tuple[ModuleType, ModuleType], line: str, done: int, total: int) -> None:
    assert modules[0].read(line) == modules[0].Step(done, total)


@pytest.mark.parametrize(
    "line",
    ["", "[x/y] no", "warning: [3/4]", "[12/] x", "\x00\xff", "Downloading (5 MB)", "[" * 99],
)
def test_other_lines_are_no_news(modules: tuple[ModuleType, ModuleType], line: str) -> None:
    assert modules[0].read(line) is None


def test_the_bar(modules: tuple[ModuleType, ModuleType]) -> None:
    log, _ = modules
    assert log.bar(log.Step(12, 48), 31.4, 8) == "llama.cpp [##......] 12/48 files, 31 s"
    assert log.bar(log.Step(50, 100), 0, 8) == "llama.cpp [####....] 50%, 0 s"
    assert log.bar(log.Step(9, 3), 1, 4) == "llama.cpp [####] 9/3 files, 1 s"
    assert log.bar(log.Step(0, 0), 1, 4) == "llama.cpp [....] 0/0 files, 1 s"


# --- what it does -----------------------------------------------------------------------------


class Recorded:
    """``setup.py`` with a venv of its own and nothing that would take long."""

    def __init__(
        self, module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, installed: str
    ) -> None:
        self.module, self.installed = module, installed
        self.pips: list[tuple[str, ...]] = []
        self.builds = 0
        self.build_fails = ""
        self.venv = folder / ".venv"
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "bin/python").symlink_to(sys.executable)
        monkeypatch.setattr(module, "VENV", self.venv)
        monkeypatch.setattr(module, "pip", self._pip)
        monkeypatch.setattr(module, "run", self._run)
        monkeypatch.setattr(module, "check_compiler", lambda: None)
        monkeypatch.delenv("CMAKE_ARGS", raising=False)

    def _pip(self, *flags: str, env: dict[str, str] | None = None) -> None:
        self.pips.append(flags)
        self.env = env
        self.installed = "0.3.36"

    def _run(self, *args: str) -> subprocess.CompletedProcess[str]:
        if args[-1].endswith("vmm.build"):
            self.builds += 1
            return subprocess.CompletedProcess(
                args, int(bool(self.build_fails)), "", self.build_fails
            )
        text = self.installed if "llama" in args[-1] else "True"
        return subprocess.CompletedProcess(args, 0 if text else 1, f"{text}\n", "")


@pytest.fixture
def recorded(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Recorded:
    return Recorded(modules[1], tmp_path, monkeypatch, "")


def test_a_second_run_does_nothing(recorded: Recorded) -> None:
    recorded.module.setup()
    assert len(recorded.pips) == 2
    recorded.module.setup()
    assert len(recorded.pips) == 2


def test_the_preload_library_is_compiled_once_and_again_when_its_source_changes(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "vmm"
    source.mkdir()
    for path in recorded.module.PRELOAD.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(recorded.module, "PRELOAD", source)
    recorded.module.setup()
    recorded.module.setup()
    assert recorded.builds == 1
    (source / "vmm.c").write_text("other")
    recorded.module.setup()
    assert recorded.builds == 2
    assert len(recorded.pips) == 2, "and nothing else"


def test_without_a_compiler_for_it_setup_goes_on(recorded: Recorded, capsys: Any) -> None:
    recorded.build_fails = "no C compiler: apt-get install gcc\n"
    recorded.module.setup()
    assert "no C compiler: apt-get install gcc" in capsys.readouterr().out
    recorded.module.setup()
    assert recorded.builds == 2, "it may have come meanwhile"
    assert len(recorded.pips) == 2


def test_what_was_interrupted_goes_on(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*flags: str, env: dict[str, str] | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorded.module, "pip", interrupt)
    with pytest.raises(KeyboardInterrupt):
        recorded.module.setup()
    monkeypatch.setattr(recorded.module, "pip", recorded._pip)
    recorded.module.setup()
    assert recorded.pips[0][-1] == "llama-cpp-python==0.3.36"
    assert recorded.pips[1][0] == "-e"


def test_the_library_is_built_once(recorded: Recorded) -> None:
    recorded.module.install_llama()
    assert recorded.pips == [("-v", "llama-cpp-python==0.3.36")]
    assert recorded.env is not None
    assert recorded.env["CMAKE_ARGS"] == "-DLLAVA_BUILD=OFF"
    recorded.module.install_llama()
    assert len(recorded.pips) == 1


def test_one_that_is_here_is_taken_as_it_is(recorded: Recorded) -> None:
    recorded.installed = "0.3.36"
    recorded.module.install_llama()
    assert recorded.pips == []
    recorded.installed = "0.3.35"
    recorded.module.install_llama()
    assert len(recorded.pips) == 1


def test_other_cmake_args_build_it_anew_and_take_no_cached_wheel(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.module.install_llama()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    recorded.module.install_llama()
    flags = recorded.pips[-1]
    for flag in ("--no-cache-dir", "--force-reinstall", "--no-deps", "--no-binary"):
        assert flag in flags
    assert recorded.env is not None
    assert recorded.env["CMAKE_ARGS"] == "-DLLAVA_BUILD=OFF -DGGML_CUDA=on"
    recorded.module.install_llama()
    assert len(recorded.pips) == 2
    monkeypatch.setenv("CMAKE_ARGS", "")
    recorded.module.install_llama()
    assert len(recorded.pips) == 3, "and back"


def test_a_forgotten_variable_keeps_a_build_for_a_gpu(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    recorded.module.setup()
    assert len(recorded.pips) == 2
    monkeypatch.delenv("CMAKE_ARGS")
    recorded.module.setup()
    assert len(recorded.pips) == 2, "nothing is done at all"
    (recorded.venv / "setup-stamp").unlink()
    recorded.module.setup()
    assert [pips[0] for pips in recorded.pips[2:]] == ["-e"]
    # A new version of the library is built for the same device.
    recorded.installed = "0.3.35"
    recorded.module.install_llama()
    assert "--no-binary" in recorded.pips[-1]
    assert recorded.env is not None
    assert recorded.env["CMAKE_ARGS"] == "-DLLAVA_BUILD=OFF -DGGML_CUDA=on"


def test_cmake_args_count_for_the_stamp(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.module.setup()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    recorded.module.setup()
    assert len(recorded.pips) == 4


def compilers(monkeypatch: pytest.MonkeyPatch, cxx: str) -> None:
    monkeypatch.setenv("CC", "sh")
    monkeypatch.setenv("CXX", cxx)


def test_no_compiler(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers(monkeypatch, "no-such-compiler")
    with pytest.raises(SystemExit, match=r"no compiler \(no-such-compiler\).*build-essential"):
        modules[1].check_compiler()


def test_a_compiler_that_cannot_compile(
    modules: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Any,
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: vector: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    compilers(monkeypatch, str(broken))
    with pytest.raises(SystemExit, match="cannot compile a small program"):
        modules[1].check_compiler()
    assert "fatal error: vector" in capsys.readouterr().out


def test_a_failing_pip_shows_the_end_of_its_log(
    modules: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Any,
) -> None:
    fake = tmp_path / "bin/python"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nfor i in $(seq 100); do echo line $i; done\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(modules[1], "VENV", tmp_path)
    with pytest.raises(SystemExit, match="pip failed"):
        modules[1].pip("anything")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "line 61"
    assert lines[-1] == "line 100"
