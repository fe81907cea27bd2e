"""The worker's command line, exit codes and log lines."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from config_search import check_search

from vram_conductor.protocol.config import Config
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from vram_conductor.worker import logs
from vram_conductor.worker.exits import exit_code
from vram_conductor.worker.options import parse

TWO = '[[device]]\nid = "cpu"\nkind = "cpu"\n[[device]]\nid = "cuda:0"\nkind = "cuda"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text("[worker]\nsample_ms = 111\nhang_ms = 222\n" + TWO)
    return path


def test_flags_over_environment_over_file_over_defaults(config: Path) -> None:
    env = {"VRAM_CONDUCTOR_WORKER_HANG_MS": "333", "VRAM_CONDUCTOR_WORKER_SAMPLE_MS": "444"}
    argv = ["--config", str(config), "--device", "cpu", "--sample-ms", "555"]
    options = parse(argv, env)
    assert options.config.worker.sample_ms == 555
    assert options.config.worker.hang_ms == 333
    assert options.config.worker.verify_digest
    assert parse(argv[:4], {}).config.worker.sample_ms == 111
    assert parse(argv[2:4], {"VRAM_CONDUCTOR_CONFIG": str(config)}).config.worker.hang_ms == 222


def test_sleep_is_set_by_flag_over_environment_over_file(config: Path) -> None:
    config.write_text(TWO.replace('kind = "cuda"', 'kind = "cuda"\nsleep = "off"'))
    argv = ["--config", str(config), "--device", "cuda:0"]
    name = "VRAM_CONDUCTOR_DEVICE_SLEEP"
    assert parse(argv, {}).device.sleep == "off"
    assert parse(argv, {name: "auto"}).device.sleep == "auto"
    assert parse(argv, {name: ""}).device.sleep == "off"
    assert parse([*argv, "--sleep", "off"], {name: "auto"}).device.sleep == "off"
    # A device that no file describes, too.
    bare = ["--device", "cuda:3"]
    assert parse(bare, {}).device.sleep == "auto"
    assert parse(bare, {name: "off"}).device.sleep == "off"
    assert parse([*bare, "--sleep", "auto"], {name: "off"}).device.sleep == "auto"
    with pytest.raises(InvalidArgument, match=name):
        parse(argv, {name: "sometimes"})
    with pytest.raises(SystemExit):
        parse([*argv, "--sleep", "sometimes"], {})


def test_endpoint_and_folders(config: Path) -> None:
    argv = ["--device", "cpu", "--workers", "ipc:///x", "--model-dirs", "/a:/b"]
    options = parse(argv, {})
    assert options.config.broker.workers == "ipc:///x"
    assert options.config.worker.model_dirs == ["/a", "/b"]


def test_which_device(config: Path) -> None:
    assert parse(["--config", str(config), "--device", "cuda:0"], {}).device.kind == "cuda"
    with pytest.raises(InvalidArgument, match="--device cpu or cuda:0"):
        parse(["--config", str(config)], {})
    with pytest.raises(InvalidArgument, match=r"\[\[device\]\]"):
        parse(["--config", str(config), "--device", "cpu:7"], {})
    assert parse(["--device", "cpu:7"], {}).device.kind == "cpu"
    assert parse(["--device", "cuda:1"], {}).device.kind == "cuda"
    with pytest.raises(InvalidArgument):
        parse(["--device", "tpu"], {})
    with pytest.raises(InvalidArgument, match="--device cpu"):
        parse([], {})


def test_the_only_device_need_not_be_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[[device]]\nid = "cpu:1"\nkind = "cpu"\n')
    assert parse(["--config", str(path)], {}).device.id == "cpu:1"


def test_bad_values_are_named(config: Path) -> None:
    for flag in ("--sample-ms", "--hang-ms"):
        with pytest.raises(InvalidArgument, match=flag[2:].replace("-", "_")):
            parse(["--device", "cpu", flag, "0"], {})
    with pytest.raises(SystemExit) as caught:
        parse(["--nonsense"], {})
    assert caught.value.code == 64


def test_exit_codes_tell_the_supervisor_whether_to_try_again() -> None:
    assert exit_code(InvalidArgument("bad_config", "x")) == 64
    assert exit_code(PermissionDenied("arena_dir_unsafe", "x")) == 69
    for alive, supervised, code in ((True, True, 69), (False, True, 75), (True, False, 75)):
        error = FailedPrecondition("arena_in_use", "x", alive=alive)
        assert exit_code(error, supervised=supervised) == code


@pytest.fixture
def project_logger() -> logging.Logger:
    return logging.getLogger("vram_conductor.worker.some")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines(log_format: logs.LogFormat, project_logger: logging.Logger) -> None:
    root = logging.getLogger("vram_conductor")
    before = (root.handlers[:], root.level, root.propagate)
    stream = io.StringIO()
    try:
        logs.set_up(log_format, "info", "cpu", stream)
        project_logger.debug("not this")
        project_logger.warning("%s is late", "it")
        try:
            raise ValueError("why")
        except ValueError:
            project_logger.exception("failed")
        stream.close()
        project_logger.warning("a closed stream stops nobody")
    finally:
        root.handlers[:], root.level, root.propagate = before


def test_log_line_fields(project_logger: logging.Logger) -> None:
    record = project_logger.makeRecord(
        project_logger.name, logging.WARNING, "f", 1, "%s is late", ("it",), None
    )
    text = logs.LineFormatter("text", "cpu").format(record)
    assert text.endswith("Z WARNING worker.some it is late device=cpu")
    parsed = json.loads(logs.LineFormatter("json", "cpu").format(record))
    assert parsed["level"] == "warning"
    assert parsed["message"] == "it is late"
    assert parsed["device"] == "cpu"


def test_without_a_flag_the_configuration_is_looked_for_where_all_commands_look(
    tmp_path: Path,
) -> None:
    assert parse(["--device", "cpu"], {"HOME": str(tmp_path)}).config == Config()
    check_search(lambda env: parse([], env).config, tmp_path)


def test_the_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    assert capsys.readouterr().out.startswith("usage: conductor worker ")
