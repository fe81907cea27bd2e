"""Norms, rotation and gate on the CPU's stand-in for a GPU."""

from layer_scenes import GatedScenes, NormScenes, RopeScenes


class TestNorm(NormScenes):
    pass


class TestRope(RopeScenes):
    pass


class TestGated(GatedScenes):
    pass
