"""The boundaries of ARCHITECTURE.md: who imports whom, what is pure, how large things may grow."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("protocol", "client", "broker", "worker")
MODULE_LINES_MAX = 300
FUNCTION_LINES_MAX = 50
NAMES_FORBIDDEN = {"utils", "util", "manager", "helper", "helpers", "common", "misc"}

IMPURE = {
    "asyncio",
    "concurrent",
    "cupy",
    "fcntl",
    "llama_cpp",
    "logging",
    "multiprocessing",
    "os",
    "psutil",
    "pynvml",
    "random",
    "secrets",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "zmq",
}
"""What a pure module may not import: clocks, files, sockets, threads, chance, devices."""

PURE = {
    "protocol": [
        "check",
        "codec",
        "commands",
        "endpoints",
        "errors",
        "limits",
        "liveness",
        "messages",
        "piece",
        "replies",
        "status",
        "stream",
        "stream_receive",
        "tokens",
        "validate",
        "values",
        "vectors.client_cases",
        "vectors.invalid_cases",
        "vectors.vector",
        "vectors.worker_cases",
    ],
    "worker": ["engine"],
}
"""Pure modules that do not say so in their docstring."""

SAID_PURE = re.compile(r"\*[Pp]ure\.?\*|\bPure\.")
"""``(*pure*)``, ``*Pure.*`` or the sentence ``Pure.`` in a module's docstring."""


@dataclass(frozen=True)
class Module:
    """One source file of a part."""

    part: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def name(self) -> str:
        """Dotted, below ``vram_conductor.<part>``, or of what is beside it."""
        inner = self.path.relative_to(ROOT / self.part / "vram_conductor")
        return ".".join(inner.with_suffix("").parts).removeprefix(f"{self.part}.")

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every imported module as a dotted name, with its line; inside functions, too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                yield node.module or "", node.lineno
                # ``from vram_conductor.broker import core`` imports a module, too.
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno


def load(part: str) -> list[Module]:
    modules: list[Module] = []
    for path in sorted((ROOT / part).rglob("*.py")):
        text = path.read_text("utf-8")
        modules.append(Module(part, path, ast.parse(text, str(path)), text.count("\n")))
    return modules


MODULES = [module for part in PARTS for module in load(part)]


def is_pure(module: Module) -> bool:
    """Said in the docstring's first lines, or listed above."""
    return bool(SAID_PURE.search(module.docstring)) or module.name in PURE.get(module.part, [])


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def shown(module: Module, line: int = 0) -> str:
    return f"{module.path.relative_to(ROOT)}:{line}"


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 50
    assert {module.part for module in MODULES} == set(PARTS)
    known = {f"{module.part}.{module.name}" for module in MODULES}
    listed = {f"{part}.{name}" for part, names in PURE.items() for name in names}
    assert listed <= known, f"not here any more: {listed - known}"


def test_parts_import_only_the_protocol_and_themselves() -> None:
    report(
        [
            f"{shown(module, line)} imports {name}"
            for module in MODULES
            for name, line in module.imports()
            if name.startswith("vram_conductor.")
            and name.split(".")[1] not in {"protocol", module.part}
        ]
    )


def test_only_the_llama_package_imports_llama_cpp() -> None:
    report(
        [
            f"{shown(module, line)} imports {name}"
            for module in MODULES
            for name, line in module.imports()
            if name.split(".")[0] == "llama_cpp"
            and not (module.part == "worker" and module.name.startswith("llama."))
        ]
    )


def test_the_broker_and_the_client_touch_no_device() -> None:
    """A router that opens a CUDA context eats the memory that it hands out."""
    devices = {"cupy", "llama_cpp", "pynvml", "torch"}
    report(
        [
            f"{shown(module, line)} imports {name}"
            for module in MODULES
            if module.part != "worker"
            for name, line in module.imports()
            if name.split(".")[0] in devices
        ]
    )


def test_the_thin_client_needs_only_the_base_install() -> None:
    """pyzmq and msgspec, and the standard library; what extras bring is imported in functions."""
    allowed = {"vram_conductor", "zmq", "msgspec", *sys.stdlib_module_names}
    problems: list[str] = []
    for module in MODULES:
        if module.part not in ("protocol", "client"):
            continue
        for node in module.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                )
                problems += [
                    f"{shown(module, node.lineno)} imports {name}"
                    for name in names
                    if name.split(".")[0] not in allowed
                ]
    report(problems)


def test_pure_modules_import_nothing_impure() -> None:
    report(
        [
            f"{shown(module, line)} is pure and imports {name}"
            for module in MODULES
            if is_pure(module)
            for name, line in module.imports()
            if name.split(".")[0] in IMPURE
        ]
    )


def test_pure_modules_import_only_pure_modules_of_ours() -> None:
    """Otherwise purity ends one import away."""
    by_name = {f"vram_conductor.{module.part}.{module.name}": module for module in MODULES}
    report(
        [
            f"{shown(module, line)} is pure and imports {name}, which is not"
            for module in MODULES
            if is_pure(module)
            for name, line in module.imports()
            if name in by_name
            and not is_pure(by_name[name])
            and name not in IMPORTED_FOR_VALUES
            and by_name[name].path.name != "__init__.py"
        ]
    )


def test_the_ledger_knows_nothing_of_the_rest_of_the_broker() -> None:
    report(
        [
            f"{shown(module, line)} imports {name}"
            for module in MODULES
            if module.part == "broker" and module.name.startswith("ledger.")
            for name, line in module.imports()
            if name.startswith("vram_conductor.broker.")
            and not name.startswith("vram_conductor.broker.ledger")
        ]
    )


IMPORTED_FOR_VALUES = {
    "vram_conductor.protocol.config",
    "vram_conductor.protocol.ids",
}
"""Shell modules of which pure code uses only types or pure functions."""


def test_modules_stay_small() -> None:
    report(
        [
            f"{shown(module)} has {module.lines} lines, the limit is {MODULE_LINES_MAX}"
            for module in MODULES
            if module.lines > MODULE_LINES_MAX
        ]
    )


def test_so_do_sources_in_c() -> None:
    sources = [path for part in PARTS for path in (ROOT / part).rglob("*.[ch]")]
    assert sources
    sizes = {path.name: len(path.read_text().splitlines()) for path in sources}
    report([f"{name} has {size} lines" for name, size in sizes.items() if size > MODULE_LINES_MAX])


def test_functions_stay_small() -> None:
    problems: list[str] = []
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    problems.append(
                        f"{shown(module, node.lineno)} {node.name} has {lines} lines, "
                        f"the limit is {FUNCTION_LINES_MAX}"
                    )
    report(problems)


def test_modules_are_named_after_a_noun_of_ours() -> None:
    report(
        [
            f"{shown(module)}: say what it is"
            for module in MODULES
            if NAMES_FORBIDDEN & set(module.name.lower().replace("_", ".").split("."))
        ]
    )


def test_every_module_says_what_it_is() -> None:
    report([f"{shown(module)} has no docstring" for module in MODULES if not module.docstring])


@pytest.mark.parametrize("part", PARTS)
def test_the_namespace_has_no_init_file(part: str) -> None:
    """PEP 420: one file would hide the other three parts."""
    assert not (ROOT / part / "vram_conductor" / "__init__.py").exists()
    assert (ROOT / part / "vram_conductor" / part / "__init__.py").exists()
    assert (ROOT / part / "vram_conductor" / part / "py.typed").exists()


def test_a_part_is_imported_without_the_others() -> None:
    """The checks above read the source; this one asks the interpreter."""
    code = (
        "import sys, vram_conductor.client, vram_conductor.protocol.codec\n"
        "import vram_conductor.protocol.sockets\n"
        "bad = [n for n in sys.modules if n.startswith(('vram_conductor.broker', "
        "'vram_conductor.worker', 'llama_cpp', 'numpy', 'pynvml', 'jinja2'))]\n"
        "sys.exit(' '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_checks_can_fail() -> None:
    """A module that breaks every rule is found by every rule."""
    text = '"""It is (*pure*)."""\nimport time\nfrom vram_conductor.worker import core\n'
    path = ROOT / "broker" / "vram_conductor" / "broker" / "utils.py"
    bad = Module("broker", path, ast.parse(text), MODULE_LINES_MAX + 1)
    saved = list(MODULES)
    MODULES.append(bad)
    try:
        for check in (
            test_parts_import_only_the_protocol_and_themselves,
            test_pure_modules_import_nothing_impure,
            test_modules_stay_small,
            test_modules_are_named_after_a_noun_of_ours,
        ):
            with pytest.raises(AssertionError, match=r"utils\.py"):
                check()
    finally:
        MODULES[:] = saved
