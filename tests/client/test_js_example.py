"""``examples/js`` against live brokers and golden vectors, where Node is and npm can download."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_process import BrokerProcess, until
from scripted_broker import Peer, ScriptedBroker

from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import Code, ErrorInfo

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "js"
VECTORS = FOLDER.parents[1] / "protocol" / "vectors"
NODE_MAJOR = 20
INSTALL_S = 120
RUN_S = 60
PROGRESS = "estimate\nload\n"
OURS = ("EUSAGE", "EINTEGRITY", "EJSONPARSE", "ETARGET", "ENOENT")
"""What npm says when the example's own files are wrong, and not the network."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its packages, as ``npm ci`` puts them there."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node and npm are not installed")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(said.removeprefix("v").split(".")[0]) < NODE_MAJOR:
        pytest.skip(f"Node {said.strip()} is older than {NODE_MAJOR}")
    folder = tmp_path_factory.mktemp("js")
    for file in FOLDER.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm could not download the packages within {INSTALL_S} s")
    assert not any(code in done.stderr for code in OURS), done.stderr
    if done.returncode != 0:
        pytest.skip(f"npm cannot download the packages: {done.stderr.strip()[:200]}")
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = ["node", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=RUN_S)
    return process.returncode, out, err


@pytest.fixture(params=["ipc", "tcp"])
def live(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[BrokerProcess]:
    """A broker process with an echo worker, 200 pieces a second."""
    flags = ["--clients", "tcp://127.0.0.1:0"] if request.param == "tcp" else []
    with BrokerProcess(short_tmp, *flags) as process:
        process.echo(rate=200)
        yield process


def test_it_streams_beyond_its_window_and_leaves_nothing_behind(
    installed: Path, live: BrokerProcess
) -> None:
    code, out, err = run(installed, "client.js", live.endpoints["clients"], "echo", "hi", "200")
    assert (code, err) == (0, PROGRESS)
    # Every piece is a clock in nanoseconds: in order, and as many as the receipt says.
    text, _, receipt = out.partition("\n{")
    assert "generated_tokens: 200," in receipt
    assert "stop_reason: 'length'" in receipt
    width = len(text) // 200
    clocks = [int(text[at : at + width]) for at in range(0, len(text), width)]
    assert len(clocks) == 200
    assert clocks == sorted(clocks)
    client = live.client()
    until(lambda: client.agents() == [], "its agent went with it")


def test_ctrl_c_cancels_the_answer(installed: Path, live: BrokerProcess) -> None:
    process = start(installed, "client.js", live.endpoints["clients"], "echo", "hi", "100000")
    assert process.stdout is not None
    assert process.stdout.read(40).isdigit(), "it streams"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=RUN_S)
    assert (process.returncode, err) == (130, PROGRESS)
    assert "stop_reason: 'cancelled'" in out


def test_a_refusal_is_its_reason(installed: Path, live: BrokerProcess) -> None:
    code, out, err = run(installed, "client.js", live.endpoints["clients"], "missing")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "no_such_model: there is no 'missing'"


def test_what_does_not_fit_is_asked_for_again(installed: Path, broker: ScriptedBroker) -> None:
    admit = broker.on[wire.Register]

    def tight(peer: Peer, message: wire.Register) -> None:
        if message.n_ctx == 512:
            admit(peer, message)
            return
        details = {"largest_n_ctx_that_fits": 512}
        error = ErrorInfo(
            Code.RESOURCE_EXHAUSTED, "VRAM_LEDGER_DENY", "it is full", True, details=details
        )
        peer.fail(message.rid, error)

    broker.on[wire.Register] = tight
    code, out, err = run(installed, "client.js", broker.endpoint, "any-model")
    assert code == 0, err
    assert out.startswith("one, two, three.")
    assert "asking for n_ctx=512: it is full" in err
    assert [message.n_ctx for message in broker.of(wire.Register)] == [None, 512]
    assert all(message.ephemeral for message in broker.of(wire.Register))
    assert len(broker.of(wire.Bye)) == 1


def test_what_may_succeed_later_has_an_exit_code_of_its_own(
    installed: Path, broker: ScriptedBroker
) -> None:
    error = ErrorInfo(Code.UNAVAILABLE, "draining", "the broker is leaving", True)
    broker.on[wire.Decode] = lambda peer, message: peer.fail(message.rid, error)
    code, _, err = run(installed, "client.js", broker.endpoint, "any-model")
    assert code == 75
    assert err.splitlines()[-1] == "draining: the broker is leaving (try again later)"


def test_nobody_at_the_endpoint(installed: Path, short_tmp: Path) -> None:
    code, _, err = run(installed, "client.js", f"ipc://{short_tmp}/nobody.ipc")
    assert (code, err) == (69, "no answer: is the broker running?\n")


def test_golden_vectors(installed: Path) -> None:
    code, out, err = run(installed, "check_vectors.js", str(VECTORS))
    assert (code, err) == (0, "")
    seen = json.loads(out)
    vectors = [
        vector
        for name in ("client", "worker", "invalid")
        for vector in json.loads((VECTORS / f"{name}.json").read_text())["vectors"]
    ]
    valid = [vector for vector in vectors if vector["ok"]]
    assert seen["decoded"] == len(valid)
    assert seen["refused"] + seen["left_to_the_broker"] == len(vectors) - len(valid)
    requests = [v for v in valid if v["direction"] == "client_to_broker" and v["json"]]
    assert seen["encoded"] == len(requests)
    # Without those that hold a whole float, which JavaScript writes as an int.
    assert seen["same_bytes"] > len(requests) // 2


MISTAKES = {
    "json": "decoded to something else",
    "bytes": "encoded to other bytes",
    "accepts": "other_preamble: was accepted",
}


@pytest.mark.parametrize("change", MISTAKES)
def test_a_changed_vector_is_noticed(installed: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(VECTORS, tmp_path, dirs_exist_ok=True)
    name, old, new = {
        "json": ("client.json", '"t": "PING"', '"t": "PONG"'),
        "bytes": (
            "client.json",
            *(f'"canonical": {word}, "note": "7 as' for word in ("false", "true")),
        ),
        "accepts": ("invalid.json", '"48545450"', '"564d4301"'),
    }[change]
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    code, _, err = run(installed, "check_vectors.js", str(tmp_path))
    assert code == 1
    assert MISTAKES[change] in err


def test_it_is_as_small_as_it_says() -> None:
    lines = [
        line.strip()
        for name in ("client.js", "wire.js")
        for line in (FOLDER / name).read_text("utf-8").splitlines()
    ]
    code = [line for line in lines if line and not line.startswith(("//", "/**"))]
    assert len(code) <= 80
