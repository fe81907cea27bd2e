"""Rounding of activations on the CPU's stand-in for a GPU."""

from rounding_scenes import RoundingScenes


class TestRounding(RoundingScenes):
    pass
