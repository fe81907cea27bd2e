"""The GPU of the process: what of its environment would spoil the books."""

from __future__ import annotations

import pytest

from vram_conductor.worker.llama.device import drop_uncountable


def test_settings_that_nobody_can_count_are_ignored_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = {"GGML_CUDA_GRAPH_OPT": "1", "GGML_CUDA_ENABLE_UNIFIED_MEMORY": "", "HOME": "/home"}
    drop_uncountable(env)
    assert env == {"HOME": "/home"}
    assert "GGML_CUDA_GRAPH_OPT is ignored" in caplog.text
    assert "GGML_CUDA_ENABLE_UNIFIED_MEMORY is ignored" in caplog.text
    caplog.clear()
    drop_uncountable(env)
    assert not caplog.text
