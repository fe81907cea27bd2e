"""Attention on the CPU's stand-in for a GPU."""

from attention_scenes import AttentionScenes, MmaScenes, StoreScenes


class TestMma(MmaScenes):
    pass


class TestStore(StoreScenes):
    pass


class TestAttention(AttentionScenes):
    pass
