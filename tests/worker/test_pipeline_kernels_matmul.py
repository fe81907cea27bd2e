"""Mat-mul kernels on the CPU's stand-in for a GPU."""

from matmul_scenes import MatmulScenes, PlainMatmulScenes


class TestMatmul(MatmulScenes):
    pass


class TestPlainMatmul(PlainMatmulScenes):
    pass
