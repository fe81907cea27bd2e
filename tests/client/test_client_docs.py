"""The examples in the docstrings are run as they stand."""

from __future__ import annotations

import asyncio
import doctest
import importlib

import pytest
from scripted_broker import ScriptedBroker

from vram_conductor.client import AsyncConductor, Conductor

MODULES = ["", ".sync", ".reply", ".agent", ".aio", ".aio_reply", ".lease", ".aio_lease"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", broker.endpoint)
    module = importlib.import_module("vram_conductor.client" + name)
    names = {"Conductor": Conductor, "AsyncConductor": AsyncConductor, "asyncio": asyncio}
    examples = [
        test
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names)
        if test.examples
    ]
    assert examples
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    for test in examples:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
