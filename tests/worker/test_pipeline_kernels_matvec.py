"""Mat-vec kernels on the CPU's stand-in for a GPU."""

from matvec_scenes import FormatScenes, MatvecScenes


class TestFormats(FormatScenes):
    pass


class TestMatvec(MatvecScenes):
    pass
