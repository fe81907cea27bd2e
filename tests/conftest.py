"""Fixtures that every part shares: seed, models, short private folders."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from vram_conductor.protocol.catalogue import load_catalogue, model_path, packaged_catalogue
from vram_conductor.protocol.config import WorkerConfig, models_dir

# NumPy's threads wait for each other for ages where cores are busy. Nobody has imported it yet.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

SEED = int(os.environ.get("VRAM_CONDUCTOR_TEST_SEED", "20240607"))

# Shared machines are slow now and then: a deadline per example would only measure that.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


# A shell that starts us in the background has SIGINT ignored, and every child would inherit that:
# what a test sends with kill must arrive as it does in a terminal.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_report_header() -> str:
    profile = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
    return f"seed: {SEED} (VRAM_CONDUCTOR_TEST_SEED), hypothesis profile: {profile}"


@pytest.fixture
def rng() -> random.Random:
    """A generator with the printed seed."""
    return random.Random(SEED)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A private folder with a path short enough for ipc sockets (107 bytes at most)."""
    path = Path(tempfile.mkdtemp(prefix="vmc-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _model(name: str) -> Path:
    entry = load_catalogue().find(name)
    assert entry is not None
    path = model_path(entry, models_dir(WorkerConfig()), packaged_catalogue().parent)
    if not path.exists():
        # Not a skip: a suite without real models would prove nothing.
        pytest.fail(f"{name} is not here; `make models` fetches it", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1: llama architecture, full attention, with a chat template."""
    return _model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M Q4_K_M: sliding window of 512, no chat template, 262k vocabulary."""
    if os.environ.get("VRAM_CONDUCTOR_TEST_GEMMA") == "0":
        pytest.skip("Gemma 3 270M was declined (GEMMA=0)")
    return _model("gemma3-270m")
