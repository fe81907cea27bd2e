"""Streamed models on the host against llama.cpp: random ones of every kind."""

from __future__ import annotations

import pytest
from engine_scenes import AgreementScenes, Site


@pytest.fixture
def site() -> Site:
    return Site("cpu", 0.999995)


class TestAgreement(AgreementScenes):
    pass
