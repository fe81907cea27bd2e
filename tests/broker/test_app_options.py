"""Flags over environment over file over defaults; wrong values are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_search import check_search

from vram_conductor.broker.shell.options import parse
from vram_conductor.protocol.config import BrokerConfig, Config, DeviceConfig, WorkerConfig, overlay
from vram_conductor.protocol.errors import InvalidArgument


def test_without_anything_the_defaults_hold() -> None:
    options = parse([], {})
    assert options.config == Config()
    assert (options.print_endpoints, options.supervised_fd, options.skip_corrupt) == (
        False,
        None,
        False,
    )


def test_each_layer_covers_the_one_below(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[broker]\ndrain_ms = 1\nmetrics_port = 1\norphan_ms = 1\n")
    env = {"VRAM_CONDUCTOR_BROKER_DRAIN_MS": "2", "VRAM_CONDUCTOR_BROKER_METRICS_PORT": "2"}
    broker = parse(["--config", str(path), "--drain-ms", "3"], env).config.broker
    assert (broker.drain_ms, broker.metrics_port, broker.orphan_ms) == (3, 2, 1)
    assert broker.heartbeat_ms == BrokerConfig().heartbeat_ms


def test_the_environment_reaches_every_key_of_its_type() -> None:
    env = {
        "VRAM_CONDUCTOR_BROKER_DEFAULT_KV_TYPE": "q8_0",
        "VRAM_CONDUCTOR_BROKER_STATE_DIR": "/x",
        "VRAM_CONDUCTOR_WORKER_MODEL_DIRS": "/a:/b",
        "VRAM_CONDUCTOR_WORKER_VERIFY_DIGEST": "false",
        "VRAM_CONDUCTOR_WORKER_SAMPLE_MS": "",
        "VRAM_CONDUCTOR_CONFIG": "not a key of a section",
        "VRAM_CONDUCTOR_TEST_SEED": "5",
        "HOME": "/h",
    }
    device = DeviceConfig(id="cpu", kind="cpu")
    config = overlay(Config(device=[device]), env)
    assert config.broker == BrokerConfig(default_kv_type="q8_0", state_dir="/x")
    assert config.worker == WorkerConfig(model_dirs=["/a", "/b"], verify_digest=False)
    assert config.device == [device]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"VRAM_CONDUCTOR_BROKER_DRAIN": "1"}, "VRAM_CONDUCTOR_BROKER_DRAIN"),
        ({"VRAM_CONDUCTOR_BROKER_DRAIN_MS": "soon"}, "VRAM_CONDUCTOR_BROKER_DRAIN_MS=soon"),
        ({"VRAM_CONDUCTOR_BROKER_DEFAULT_KV_TYPE": "f99"}, "f99"),
        ({"VRAM_CONDUCTOR_WORKER_": "1"}, "unknown key"),
    ],
)
def test_wrong_variables_are_named(env: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        overlay(Config(), env)
    assert caught.value.reason == "bad_config"


def test_wrong_flags_are_named_and_absent_ones_count_nothing() -> None:
    flags: dict[str, Any] = {"broker": {"drain_ms": None, "state_dir": "/y"}}
    assert overlay(Config(), {}, flags).broker == BrokerConfig(state_dir="/y")
    with pytest.raises(InvalidArgument, match="--drain-ms=no"):
        overlay(Config(), {}, {"broker": {"drain_ms": "no"}})


@pytest.mark.parametrize(
    "flags",
    [["--frobnicate"], ["--drain-ms", "soon"], ["--log-format", "xml"], ["--supervised-fd", "x"]],
)
def test_wrong_flags_end_with_the_usage_code(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flags, {})
    assert caught.value.code == 64


@pytest.mark.parametrize(
    "key", ["worker_inflight", "default_n_ctx", "heartbeat_ms", "queued_jobs_max"]
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[broker]\n{key} = 0\n")
    with pytest.raises(InvalidArgument, match=key):
        parse(["--config", str(path)], {})


def test_a_port_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="metrics_port"):
        parse(["--metrics-port", "65536"], {})


def test_without_a_flag_the_configuration_is_looked_for_where_all_commands_look(
    tmp_path: Path,
) -> None:
    assert parse([], {"HOME": str(tmp_path)}).config == Config()
    check_search(lambda env: parse([], env).config, tmp_path)


def test_the_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    assert capsys.readouterr().out.startswith("usage: conductor broker ")
