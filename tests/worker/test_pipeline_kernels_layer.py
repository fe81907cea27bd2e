"""Norms, rotation, gate and choice on the CPU's stand-in for a GPU."""

from argmax_scenes import ArgmaxScenes
from layer_scenes import GatedScenes, NormScenes, RopeScenes


class TestArgmax(ArgmaxScenes):
    pass


class TestNorm(NormScenes):
    pass


class TestRope(RopeScenes):
    pass


class TestGated(GatedScenes):
    pass
