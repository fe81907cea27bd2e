"""RUN's transcript: what the worker has, what it was sent. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.worker.transcript import Transcript, ids_from_raw


def take_transcript(transcript: Transcript, run: Run, raw: Sequence[bytes]) -> None:
    """Bring ``transcript`` to the version that ``run`` refers to.

    Raises:
        FailedPrecondition: ``transcript_missing``: the broker must send it.
        InvalidArgument: ``bad_transcript``; nothing was changed.
    """
    if len(raw) != run.n_raw or run.n_raw > 1:
        raise InvalidArgument(
            "bad_transcript",
            f"RUN announces {run.n_raw} buffers and has {len(raw)}; it may have one",
            announced=run.n_raw,
            buffers=len(raw),
        )
    if raw:
        transcript.replace(ids_from_raw(raw[0], run.transcript_tokens), run.version)
        return
    if run.transcript_tokens == 0:
        transcript.replace(np.empty(0, np.int32), run.version)
        return
    if transcript.version != run.version or len(transcript.ids) != run.transcript_tokens:
        raise FailedPrecondition(
            "transcript_missing",
            f"the transcript at version {run.version} with {run.transcript_tokens} tokens is not "
            "here; send it with the job",
            retryable=True,
            version=run.version,
            transcript_tokens=run.transcript_tokens,
            known_version=transcript.version,
            known_tokens=len(transcript.ids),
        )
