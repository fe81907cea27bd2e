"""Streamed models on the GPU: the host's scenes, and a real model against llama.cpp on the host."""

from __future__ import annotations

import os

import pytest
from engine_life_scenes import LifeScenes
from engine_scenes import AgreementScenes, Site


@pytest.fixture
def site() -> Site:
    # Factors of products of several tokens are rounded to float16.
    return Site(os.environ.get("VRAM_CONDUCTOR_TEST_DEVICE", "cuda:0"), 0.9999)


class TestAgreement(AgreementScenes):
    pass


class TestLife(LifeScenes):
    pass
