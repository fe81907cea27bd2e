"""Every file in ``configs/`` is what its readers take it for."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from vram_conductor.client.cli_run import managed_devices
from vram_conductor.client.demo_models import FIRST, ORIGINAL, SECOND
from vram_conductor.protocol.catalogue import load_catalogue, packaged_catalogue
from vram_conductor.protocol.config import (
    ENV_PREFIX,
    BrokerConfig,
    Config,
    load_config,
    parse_bytes,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SPLIT = [CONFIGS / f"{part}.toml" for part in ("broker", "client", "worker")]
"""Of a deployment over several hosts: each describes one host."""

FILES = sorted(
    path for path in CONFIGS.glob("*.toml") if path.name != "models.toml" and path not in SPLIT
)


def test_there_are_some() -> None:
    assert [path.name for path in FILES] == ["cpu.toml", "gpu-8gb.toml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_loads_and_serves_somebody(path: Path) -> None:
    config = load_config(path)
    assert managed_devices(config, path) == [device.id for device in config.device]
    for device in config.device:
        assert device.id.partition(":")[0] == device.kind
        assert 0 < device.admission_percent <= 100
        assert parse_bytes(device.host_cap) > 0
        if device.kind == "cpu":
            assert parse_bytes(device.capacity) > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_its_first_comment_says_how_to_start_it(path: Path) -> None:
    assert f"conductor up --config configs/{path.name}" in path.read_text()


def test_the_cpu_example_shows_the_defaults() -> None:
    """What its comments explain is what happens without the file."""
    config = load_config(CONFIGS / "cpu.toml")
    assert config.broker == Config().broker
    assert config.worker == Config().worker


@pytest.mark.parametrize("path", SPLIT, ids=lambda path: path.name)
def test_the_split_ones_agree_on_where_the_broker_is(path: Path) -> None:
    text = path.read_text()
    assert "docs/two-hosts.md" in text
    assert f"--config configs/{path.name}" in text
    config = load_config(path)
    ports = {"clients": ":7800", "workers": ":7801"}
    named = {name for name in ports if getattr(config.broker, name)}
    assert named == {"broker": set(ports), "client": {"clients"}, "worker": {"workers"}}[path.stem]
    for name in named:
        assert getattr(config.broker, name).endswith(ports[name])
    assert bool(config.client.key) == (path.stem == "client")
    assert bool(config.worker.key) == (path.stem == "worker")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_names_what_a_second_instance_needs_and_the_environment(path: Path) -> None:
    text = path.read_text()
    for key in ("runtime_dir", "state_dir", "metrics_port"):
        assert key in BrokerConfig.__struct_fields__
        assert key in text
    assert "arena_dir" in text
    assert f"{ENV_PREFIX}<SECTION>_<KEY>" in text


def test_the_catalogue() -> None:
    assert packaged_catalogue() == CONFIGS / "models.toml"
    catalogue = load_catalogue()
    assert catalogue.names() == [FIRST, SECOND, *ORIGINAL]
    for entry in catalogue.model:
        assert entry.licence_url.startswith("https://")
        assert entry.gated == (entry.licence != "Apache-2.0")
        assert bool(entry.notice) == entry.gated


def test_the_catalogue_explains_all_of_its_keys() -> None:
    text = (CONFIGS / "models.toml").read_text()
    comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
    entry = load_catalogue().model[0]
    for name in entry.__struct_fields__:
        assert re.search(rf"\b{name}\b", comment), name


def test_a_wrong_key_is_an_error() -> None:
    text = (CONFIGS / "cpu.toml").read_text() + "capacty = 5\n"
    with pytest.raises(msgspec.ValidationError, match="capacty"):
        msgspec.toml.decode(text, type=Config)


@pytest.mark.real
def test_the_catalogue_knows_the_training_of_its_models(smollm2: Path, gemma3: Path) -> None:
    from vram_conductor.client.probing import estimates

    answers = estimates([smollm2, gemma3], 256)
    trained = [answer["info"]["n_ctx_train"] for answer in answers]
    assert trained == [entry.n_ctx for entry in load_catalogue().model[:2]]
