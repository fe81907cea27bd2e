"""The kernels' source text, and their names.

The files of ``kernels/`` include nothing: NVRTC needs no headers then. What a file needs of another
is put before it.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.resources import files

from vram_conductor.worker.pipeline.tensor_types import TensorType

NEEDS: dict[str, tuple[str, ...]] = {
    "argmax.cu": (),
    "attention.cu": (
        *("formats.cu", "mma.cu"),
        *("attention_heads.cu", "attention_split.cu", "attention_tile.cu"),
    ),
    "attention_heads.cu": ("formats.cu",),
    "attention_split.cu": ("formats.cu", "attention_heads.cu"),
    "attention_tile.cu": ("formats.cu", "mma.cu", "attention_heads.cu"),
    "formats.cu": (),
    "gated.cu": (),
    "matmul.cu": ("formats.cu", "mma.cu", "pairs.cu", "matmul_weights.cu", "to_half.cu"),
    "matmul_weights.cu": ("formats.cu", "pairs.cu"),
    "matvec.cu": ("formats.cu",),
    "mma.cu": ("formats.cu",),
    "norm.cu": (),
    "pairs.cu": ("formats.cu",),
    "rope.cu": (),
    "synthetic.cu": (),
    "to_half.cu": ("formats.cu",),
}
"""Each file of ``kernels/``, and those that must stand before it."""


def kernel_source(
    *names: str, kinds: Collection[TensorType] = tuple(TensorType), defines: str = ""
) -> str:
    """One translation unit with these files and all that they need, each once.

    Args:
        names: file names, keys of :data:`NEEDS`.
        kinds: types of matrices that products are wanted with: each takes a second or more to
            compile.
        defines: ``#define`` lines that come first.
    """
    types = " ".join(f"DO({kind.name.lower()}, {kind.name})" for kind in sorted(kinds))
    wanted: list[str] = []
    for name in names:
        wanted += [file for file in (*NEEDS[name], name) if file not in wanted]
    folder = files("vram_conductor.worker.pipeline.kernels")
    # A compiler's message then names the file and its own line.
    parts = [f'#line 1 "{name}"\n{(folder / name).read_text("utf-8")}' for name in wanted]
    return "\n".join([f"#define TYPES(DO) {types}", defines, *parts])


def matvec_name(kind: TensorType) -> str:
    """The ``matvec.cu`` kernel for a matrix of that type."""
    return f"matvec_{kind.name.lower()}"
