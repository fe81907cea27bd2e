"""llama-cpp-python (0.3.36) where its own annotations do not help."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as ll

unannotated: Any = ll
"""The binding, for functions whose annotations are wrong: they want a ctypes object for the id of
a sequence, ``bytes`` for a buffer that is written into, an array or a pointer for a structure."""

shared_object: Any = ll._lib  # pyright: ignore[reportPrivateUsage]
"""libllama itself. ggml's own functions are found through it, since it is linked to ggml: the
shared objects beside it have other names in other builds."""


def vocabulary(model: Any) -> Any:
    """The ``llama_vocab`` of a ``llama_model``; every loaded model has one."""
    return ll.llama_model_get_vocab(model)
