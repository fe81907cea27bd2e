"""Writes a GGUF anew in another quantisation, with llama.cpp's own quantiser.

The demo makes a second model this way where no second one may be fetched; the layer pipeline's
bench has llama.cpp compute with the same weights as float32.
"""

from __future__ import annotations

from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.worker.llama.binding import unannotated
from vram_conductor.worker.llama.library import cpu_threads, library
from vram_conductor.worker.llama.options import EngineOptions

_FTYPES = {
    "q8_0": ll.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": ll.LLAMA_FTYPE_MOSTLY_Q4_0,
    "f32": ll.LLAMA_FTYPE_ALL_F32,
}


def requantise(source: str, target: str, kind: str) -> None:
    """Write ``source`` to ``target`` with weights of type ``kind`` (``q8_0``, ``q4_0``, ``f32``).

    Raises:
        InvalidArgument: ``bad_quantisation``: another type.
        FailedPrecondition: ``requantise_failed``: llama.cpp refused; ``target`` is not usable.
    """
    ftype = _FTYPES.get(kind)
    if ftype is None:
        raise InvalidArgument(
            "bad_quantisation", f"{kind!r} is none of {', '.join(sorted(_FTYPES))}", kind=kind
        )
    library()
    params = ll.llama_model_quantize_default_params()
    params.ftype = ftype
    params.allow_requantize = True
    params.nthread = cpu_threads(EngineOptions())
    code = unannotated.llama_model_quantize(source.encode(), target.encode(), params)
    if code != 0:
        raise FailedPrecondition(
            "requantise_failed",
            f"llama.cpp could not requantise {source} (code {code}): the file is damaged, or there "
            f"is no room for {target}",
            exit_code=code,
        )
